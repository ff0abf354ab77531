"""The ops on DTensors: each rank runs them on its own batch entries or heads, and nothing is sent.

A rule for the class DTensor, not a sharding strategy: a strategy can't see which gradients are asked for without
private names, and for inputs that it doesn't list DTensor gathers them without a word.  Here they are an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import hooks
from .extras import EXTRAS
from .layout import dense_strides
from .library import DEFAULT_GRADS, LIB, attn, attn_backward

BATCH, HEADS = 0, 1  # of query, key, value, out and lse
# The optional tensors: their dims that follow the batch and the heads.
_DIMS: dict[str, tuple[int | None, int | None]] = {
    "bias": (0, 1),
    "mask": (0, 1),
    "query_segments": (0, None),
    "key_segments": (0, None),
    "sinks": (None, 0),
    "key_range": (0, None),
    "query_range": (0, None),
    "rng_state": (None, None),
}


def register() -> None:
    """Teach DTensor the ops.  Called once, when somebody has imported torch.distributed.tensor."""
    from torch.distributed.tensor import DTensor

    for op, rule in ((attn, _forward), (attn_backward, _backward)):
        torch.library.register_torch_dispatch(op.name(), DTensor, rule, lib=LIB)


def unsupported_reason(tensors: Sequence[tuple[str, Tensor]]) -> str | None:
    """Why the op doesn't take these DTensors (query, key and value, by name), or None."""
    try:
        _Split.of(tensors)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Split:
    """How a call is split: for each dim of the mesh BATCH, HEADS or None (every rank has it all)."""

    mesh: Any
    roles: tuple[int | None, ...]
    shares_keys: bool = False  # more ranks than key heads: keys whole on each rank, which takes the head it needs

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Any]]) -> _Split:
        from torch.distributed.tensor import DTensor

        for name, x in tensors:
            if not isinstance(x, DTensor):
                raise TypeError(f"{name}: expected a DTensor, because other inputs are, got {type(x).__name__}")
        mesh = tensors[0][1].device_mesh
        for name, x in tensors:
            if x.device_mesh != mesh:
                raise ValueError(f"{name}: expected the mesh of {tensors[0][0]}, {mesh}, got {x.device_mesh}")
        roles = tuple(_role(tensors, i) if mesh.size(i) > 1 else None for i in range(mesh.ndim))
        by_name = dict(tensors)
        query, key = by_name["query"], by_name["key"]
        if query.dim() != 4 or key.dim() != 4:
            return cls(mesh, (None,) * mesh.ndim)  # the op's own checks say what is wrong
        parts = 1
        for i, role in enumerate(roles):
            parts *= mesh.size(i) if role == HEADS else 1
        q_heads, k_heads = query.shape[1], key.shape[1]
        shares_keys = k_heads % parts != 0
        if q_heads % parts or (shares_keys and parts % k_heads):
            raise ValueError(
                f"query: expected heads that {parts} ranks can share without cutting a group of grouped-query "
                f"attention, got {q_heads} heads and {k_heads} key heads; replicate them, or use another mesh"
            )
        return cls(mesh, roles, shares_keys)

    def placements(self, batch: int | None = BATCH, heads: int | None = HEADS) -> list[Any]:
        """Where a tensor goes whose dims ``batch`` and ``heads`` are these (None: it has no such dim)."""
        from torch.distributed.tensor import Replicate, Shard

        dims = {BATCH: batch, HEADS: heads, None: None}
        own = [dims[role] for role in self.roles]
        return [Replicate() if dim is None else Shard(dim) for dim in own]

    def of_optional(self, name: str, x: Any) -> list[Any]:
        """The same for an optional tensor, where a dim of size 1 stands for all."""
        return self.placements(*(None if dim is None or x.shape[dim] == 1 else dim for dim in _DIMS[name]))

    def of_keys(self) -> list[Any]:
        return self.placements(heads=None if self.shares_keys else HEADS)

    def of_grad(self, placements: Sequence[Any]) -> list[Any]:
        """The gradient of a tensor placed so: where a split rank had all of it, its gradient is a part of the sum."""
        from torch.distributed.tensor import Partial, Replicate

        pairs = zip(placements, self.roles, strict=True)
        return [Partial() if p == Replicate() and role is not None else p for p, role in pairs]

    def key_head(self, heads: int) -> int:
        """Which key head of ``heads`` the queries of this rank use, if ``shares_keys``."""
        index, parts = 0, 1
        for i, role in enumerate(self.roles):
            if role == HEADS:
                index = index * self.mesh.size(i) + self.mesh.get_local_rank(i)
                parts *= self.mesh.size(i)
        return index * heads // parts

    def local(self, x: Any, placements: Sequence[Any]) -> Any:
        if tuple(x.placements) == tuple(placements):
            return x.to_local()
        # Detached, because redistribute marks its result as requiring a gradient, which torch 2.11 can't undo here.
        return x.detach().redistribute(self.mesh, placements).to_local()

    def local_keys(self, x: Any) -> Any:
        whole = self.local(x, self.of_keys())
        return whole.narrow(1, self.key_head(x.shape[1]), 1) if self.shares_keys else whole

    def wrap(self, local: Tensor, shape: Sequence[Any], placements: Sequence[Any]) -> Any:
        from torch.distributed.tensor import DTensor

        known: dict[str, Any] = {}
        if all(isinstance(n, int) for n in (*shape, *local.shape)):  # needed where the parts are unequal
            shape = torch.Size(shape)
            known = {"shape": shape, "stride": dense_strides(local.stride(), local.shape, shape)}
        return DTensor.from_local(local, self.mesh, placements, run_check=False, **known)


def _role(tensors: Sequence[tuple[str, Any]], i: int) -> int | None:
    """What dim ``i`` of the mesh splits: the first of the tensors that is split says it, the others can follow."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    found = None
    for name, x in tensors:
        placement = x.placements[i]
        if type(placement) is Shard and placement.dim in (BATCH, HEADS):
            found = placement.dim if found is None else found
        elif not isinstance(placement, (Replicate, Partial)):
            raise NotImplementedError(
                f"{name}: expected Shard(0) (batch), Shard(1) (heads), Replicate or Partial, got {placement}; "
                "redistribute it to one of these, or for a sequence sharded over ranks "
                "use flash_inductor.distributed.ContextParallel on local tensors"
            )
    return found


def _optional(split: _Split, given: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, list[Any]]]:
    """The optional tensors of this rank, and their placements by name."""
    from torch.distributed.tensor import DTensor

    found: list[Any] = []
    places: dict[str, list[Any]] = {}
    if options.get("dropout_p") and any(role is not None for role in split.roles):
        raise NotImplementedError(
            "dropout_p: expected 0 for DTensors that are split over ranks, because what is dropped depends on the "
            "index of batch entry and head; call the op on local tensors with a rng_state for each rank"
        )
    for name, x in zip(EXTRAS, given, strict=False):
        if x is None:
            found.append(None)
            continue
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: expected a DTensor, because query is one, got {type(x).__name__}")
        places[name] = split.of_optional(name, x)
        found.append(split.local(x, places[name]))
    return found, places


@torch.no_grad()
def _forward(cls: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    query, key, value, *extras = args
    options = kwargs or {}
    split = _Split.of((("query", query), ("key", key), ("value", value)))
    rows = split.placements()
    optional, _ = _optional(split, extras, options)
    inputs = (split.local(query, rows), split.local_keys(key), split.local_keys(value))
    out, lse = op(*inputs, *optional, **options)
    shape = query.shape[:3]
    return split.wrap(out, (*shape, value.shape[3]), rows), split.wrap(lse, shape, rows)


@torch.no_grad()
def _backward(cls: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    grad_out, grad_lse, query, key, value, out, lse, *extras = args
    options = kwargs or {}
    split = _Split.of((("query", query), ("key", key), ("value", value), ("out", out), ("lse", lse)))
    rows = split.placements()
    optional, places = _optional(split, extras, options)
    grads_of_rows = [None if x is None else split.local(x, rows) for x in (grad_out, grad_lse)]
    inputs = (split.local(query, rows), split.local_keys(key), split.local_keys(value))
    grads = op(*grads_of_rows, *inputs, *(split.local(x, rows) for x in (out, lse)), *optional, **options)
    given = dict(zip(EXTRAS, extras, strict=False))
    keys = split.of_keys()
    sources = (
        (query, rows),
        (key, keys),
        (value, keys),
        (given.get("bias"), places.get("bias", [])),
        (given.get("sinks"), places.get("sinks", [])),
    )
    found = []
    wanted = options.get("grad_mask", DEFAULT_GRADS)
    for asked, grad, (source, placements) in zip(wanted, grads, sources, strict=True):
        if not asked:
            found.append(split.wrap(grad, (0,), split.placements(None, None)))
            continue
        if split.shares_keys and (source is key or source is value):
            whole = grad.new_zeros((grad.shape[0], source.shape[1], *grad.shape[2:]))
            whole.narrow(1, split.key_head(source.shape[1]), 1).copy_(grad)
            grad = whole
        found.append(split.wrap(grad, source.shape, split.of_grad(placements)))
    return tuple(found)


hooks.when_imported("torch.distributed.tensor", register)
