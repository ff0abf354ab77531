"""Splits a mask or bias into what the op takes: a band, key padding, segments, an opaque mask, a bias.

A band that is proved (masks.py) needs no tensor.  Otherwise the mask's conditions are told apart: those on key minus
query only become the band; those read from tensors of the graph become operands, as small as they are there.  What
can't be told apart is passed on whole, as the graph holds it: a bool as a mask, numbers as a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..spec import MaskSpec
from . import canonical, closed, effects, masks, safety
from .canonical import Arg
from .mask_domain import NEGLIGIBLE, Linear, Pred, TwoValued, Unknown, Value, broadcast, simplify
from .mask_interpreter import Interpreter
from .mask_packed import bands_within_segments
from .mask_reads import Read, Sum, Truth
from .masks import MaskProof, Refusal
from .operands import Operands, Part, Place
from .program import Program, Refused


def resolve(program: Program, mask: Arg, kind: str, place: Place) -> MaskProof:
    """What a mask means, as a band and operands.  Raises Refused.

    ``kind`` is "keep", "drop" or "additive", see :func:`masks.prove`.
    """
    proof: MaskProof | Refusal = Refusal("the mask is subtracted")
    if place.factor > 0:
        proof = _proved(program, mask, kind, place)
    if isinstance(proof, MaskProof):
        proof = replace(proof, finite=proof.finite or (kind != "additive" and place.fill != -math.inf))
        if proof.ceiling * place.factor <= NEGLIGIBLE:
            return proof
    if not isinstance(mask, fx.Node) or canonical.tensor(mask) is None:
        raise Refused(
            proof.reason
            if isinstance(proof, Refusal)
            else "the mask is not a tensor; pass a bool or float one, or None"
        )
    return _Splitter(program, place, proof).run(mask, kind)


def _proved(program: Program, mask: Arg, kind: str, place: Place) -> MaskProof | Refusal:
    """As :func:`masks.prove`, once for all layers that use the same mask while nothing writes to it."""
    decided = tuple(effects.closure(mask, place.at)) if isinstance(mask, fx.Node) else ()
    q_len, kv_len = place.table[-2:]
    sizes = tuple(x.node.expr if isinstance(x, torch.SymInt) else x for x in (q_len, kv_len))
    key = (mask, kind, sizes, decided)
    if key not in program.proofs:
        program.proofs[key] = masks.prove(mask, kind, q_len, kv_len, place.at, program.settled)
    found: MaskProof | Refusal = program.proofs[key]
    return found


class _Splitter:
    def __init__(self, program: Program, place: Place, proof: MaskProof | Refusal) -> None:
        self.program, self.place = program, place
        self.reason = proof.reason if isinstance(proof, Refusal) else "the mask does not hide pairs"
        self.buffers: list[fx.Node] = []

    def run(self, mask: fx.Node, kind: str) -> MaskProof:
        value = self._value(mask)
        tensor = canonical.tensor(mask)
        assert tensor is not None  # the caller looked
        if kind != "additive" and tensor.dtype is not torch.bool:
            raise Refused(
                f"the mask is {tensor.dtype} where a bool is expected; compare it, as in mask > 0, or pass a bool mask"
            )
        finite = kind != "additive" and self.place.fill != -math.inf
        try:
            if isinstance(value, Sum):
                return self._sum(value, tensor.dtype)
            if isinstance(value, TwoValued):
                return self._masked(self._signed(value), kind, tensor.dtype, finite)
        except Unknown:
            pass
        return self._whole(mask, kind, value, finite)

    def _value(self, mask: fx.Node) -> Value | None:
        """The mask's value over the table, or None."""

        def leaf(node: fx.Node) -> Value | None:
            real = masks.readable(node)
            value = None if real is None else closed.recognise(real)
            if isinstance(value, TwoValued):
                self.buffers.append(node)
                return value
            return None

        tensor = canonical.tensor(mask)
        assert tensor is not None  # the caller looked
        off = safety.without_grad(self.program)
        try:
            with unset_fake_temporarily(), torch.no_grad():
                value = Interpreter(leaf, reads=True, without_grad=off).run(mask, self.place.at)
                shape = [simplify(s) for s in tensor.shape]
                return broadcast(value, shape, [simplify(s) for s in self.place.table])
        except Unknown:
            return None

    # --- told apart

    def _sum(self, value: Sum, dtype: torch.dtype) -> MaskProof:
        biases = tuple(self._part(read, factor=factor * self.place.factor) for read, factor in value.terms)
        rest = self._masked(self._signed(value.rest), "additive", dtype, False)
        return replace(rest, operands=rest.operands.merged(Operands(bias=biases)))

    def _signed(self, value: TwoValued) -> TwoValued:
        """What is added, if the mask is subtracted."""
        if self.place.factor > 0:
            return value
        return TwoValued(value.where, (-value.yes[1], -value.yes[0]), (-value.no[1], -value.no[0]))

    def _masked(self, value: TwoValued, kind: str, dtype: torch.dtype, finite: bool) -> MaskProof:
        visible, ceiling = masks.visible_where(value, kind, dtype)
        if ceiling * abs(self.place.factor) > NEGLIGIBLE or visible.negated:
            raise Unknown("the mask is a union of regions, or doesn't hide")
        atoms = bands_within_segments(self.program, visible.atoms)
        truths = [a for a in atoms if isinstance(a, Truth)]
        band = masks.band(Pred.of([a for a in atoms if isinstance(a, Linear)]), self.place.table)
        proof = self._proof(band, finite or ceiling != -math.inf)
        return replace(proof, operands=self._operands(truths), ceiling=ceiling)

    def _operands(self, truths: Sequence[Truth]) -> Operands:
        segments: tuple[Part, Part] | None = None
        parts: list[Part] = []
        for truth in truths:
            pair = None if segments is not None else self._segments(truth)
            if pair is not None:
                segments = pair
                continue
            part = self._part(truth.read, negated=truth.negated)
            if part.over_queries and part.over_keys:
                raise Unknown("a condition on queries and keys together is held by the graph as part of the whole")
            parts.append(part)
        if any(p.over_queries for p in parts) and any(p.over_keys for p in parts):
            raise Unknown("the conditions on queries and on keys together are as large as the whole")
        both = segments or (None, None)
        return Operands(mask=tuple(parts), query_segments=both[0], key_segments=both[1])

    def _segments(self, truth: Truth) -> tuple[Part, Part] | None:
        """The ids that are equal where a condition holds: one for each query, one for each key."""
        if truth.equal is None or not all(read.small for read in truth.equal):
            return None
        rank = len(self.place.table)
        query, key = truth.equal
        if rank - 1 in query.dims:
            query, key = key, query
        try:
            parts = self._part(query), self._part(key)
        except Unknown:
            return None
        lead = {d for part in parts for d in part.dims if d < rank - 2}
        own = parts[0].over_queries and not parts[0].over_keys and parts[1].over_keys and not parts[1].over_queries
        return parts if own and all(self.place.batch[d] for d in lead) else None

    def _part(self, read: Read, **changes: Any) -> Part:
        part = Part(read.node, read.since, read.index, tuple(self.place.table), **changes)
        obstacle = part.obstacle() or self._written(part)
        if obstacle is not None or read.plus:
            raise Unknown(obstacle or "a number is added to what is read")
        return part

    def _written(self, part: Part) -> str | None:
        writes = self.program.writes_between(part.node, self.program.position[part.since], len(self.program.nodes))
        return f"`{part.node.name}` is written to in place" if writes else None

    def _proof(self, band: MaskSpec, finite: bool) -> MaskProof:
        return replace(masks.checked(band, finite, *self.place.table[-2:]), buffers=tuple(dict.fromkeys(self.buffers)))

    # --- whole

    def _whole(self, mask: fx.Node, kind: str, value: Value | None, finite: bool) -> MaskProof:
        """The mask as the graph holds it."""
        place = self.place
        if kind == "additive":
            self._check_additive(mask, value)
            condition = self._condition(mask, value) if place.factor > 0 else None
            if condition is not None:
                return condition
            part = Part.whole(mask, place.at, place.table)
            return MaskProof(
                MaskSpec(),
                sizes=(place.table[-2], place.table[-1]),
                operands=Operands(bias=(replace(part, factor=place.factor),)),
            )
        band = self._band_of(value, kind, finite)
        if self._hides_a_row(mask, kind, finite):
            raise Refused(
                "a row of the mask hides every key, so that softmax averages over all of them; "
                "use float('-inf') or a bool mask, or let each query see a key"
            )
        part = Part.whole(mask, place.at, place.table)
        return replace(band, finite=finite, operands=Operands(mask=(replace(part, negated=kind == "drop"),)))

    def _band_of(self, value: Value | None, kind: str, finite: bool) -> MaskProof:
        """The band that a bool mask lies within, which spares blocks."""
        full = MaskProof(MaskSpec(), sizes=(self.place.table[-2], self.place.table[-1]))
        if not isinstance(value, TwoValued):
            return full
        try:
            visible, _ = masks.visible_where(value, kind, torch.bool)
        except Unknown:
            return full
        if visible.is_false:
            raise Refused("the mask hides everything; let each query see a key")
        if visible.negated:
            return full
        atoms = bands_within_segments(self.program, visible.atoms)
        try:
            band = masks.band(Pred.of([a for a in atoms if isinstance(a, Linear)]), self.place.table)
            return self._proof(band, False)
        except Unknown:
            return full

    def _check_additive(self, mask: fx.Node, value: Value | None) -> None:
        """Raise Refused if a row is known to get a large number everywhere.

        Softmax doesn't see it, but the backward does: the log-sum-exp of the row holds it, and has no digits left.
        """
        tensor = canonical.tensor(mask)
        assert tensor is not None  # the caller looked
        if isinstance(value, TwoValued):
            try:
                visible, _ = masks.visible_where(self._signed(value), "additive", tensor.dtype)
                masks.checked(masks.band(visible, self.place.table), True, *self.place.table[-2:])
            except masks.SeesNothing as reason:
                raise Refused(Refusal(str(reason)).reason) from reason
            except Unknown:
                pass
        with unset_fake_temporarily(), torch.no_grad():
            real = closed.evaluate(mask, self.place.at, masks.readable)
            if not isinstance(real, str) and real.tensor.dim():
                added = real.tensor.double() * self.place.factor
                if bool((added.amax(-1) <= NEGLIGIBLE).any()):
                    raise Refused(
                        "a row of the mask hides every key, so that softmax averages over all of them; "
                        "use float('-inf') or a bool mask, or let each query see a key"
                    )

    def _hides_a_row(self, mask: fx.Node, kind: str, finite: bool) -> bool:
        """Whether a row is known to see nothing, where the scores of hidden pairs are finite: it gets a mean then."""
        if not finite:
            return False
        with unset_fake_temporarily(), torch.no_grad():
            real = closed.evaluate(mask, self.place.at, masks.readable)
            if isinstance(real, str):
                return False
            shown = real.tensor if kind == "keep" else ~real.tensor
            return not bool(shown.any(-1).all())

    def _condition(self, mask: fx.Node, value: Value | None) -> MaskProof | None:
        """An additive mask by the bool that it is made of, which is smaller and has a band."""
        if not isinstance(value, TwoValued):
            return None
        tensor = canonical.tensor(mask)
        c = self.program.value(mask, self.place.at)
        if tensor is None or c is None or c.op not in ("where", "masked_fill"):
            return None
        try:
            visible, ceiling = masks.visible_where(value, "additive", tensor.dtype)
        except Unknown:
            return None
        if ceiling * abs(self.place.factor) > NEGLIGIBLE or visible.is_false or visible.is_true:
            return None
        condition = c["condition" if c.op == "where" else "mask"]
        return self._by_condition(condition, c, visible, ceiling)

    def _by_condition(self, condition: fx.Node, c: canonical.Call, visible: Pred, ceiling: float) -> MaskProof | None:
        place = replace(self.place, at=c.node, fill=ceiling)
        for kind in ("keep", "drop"):
            splitter = _Splitter(self.program, place, Refusal(self.reason))
            value = splitter._value(condition)
            if not isinstance(value, TwoValued):
                return None
            try:
                shown, _ = masks.visible_where(value, kind, torch.bool)
            except Unknown:
                return None
            if shown == visible:
                return splitter.run(condition, kind)
        return None
