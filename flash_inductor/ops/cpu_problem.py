"""How the CPU kernels cut one call into tiles of scores, and what is hidden in each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .. import support
from ..spec import AttentionSpec, MaskSpec
from .extras import Extras
from .philox import dropped
from .ranges import RANGE_BLOCK, block_ranges

BLOCK = 128
SHORT = 512  # a shorter sequence is one block if all its scores fit a tile: few calls matter more than skipped pairs
TILE_ELEMENTS = 1 << 20  # scores held at once; batch and heads are split to stay near it


@dataclass(frozen=True)
class Part:
    """Batch entries, query heads and key heads whose scores are computed together."""

    batch: slice
    heads: slice
    kv_heads: slice


@dataclass(frozen=True)
class Tile:
    """Queries i0 <= i < i1 against keys j0 <= j < j1, none of them if nothing is visible.

    ``hidden`` [batch or 1, heads or 1, queries or 1, keys] is True where a pair isn't visible; None if only the band
    hides something, or nothing.
    """

    i0: int
    i1: int
    j0: int
    j1: int
    hidden: Tensor | None = None
    in_band: bool = False  # every pair of the tile is, or ``hidden`` says which aren't

    @property
    def empty(self) -> bool:
        return self.j0 >= self.j1


@dataclass(frozen=True)
class Problem:
    """Sizes, band and optional tensors of one call; ``rows`` are the queries whose band holds a key."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    band: MaskSpec
    scale: float
    softcap: float | None
    dropout_p: float
    extras: Extras
    dtype: torch.dtype
    rows: range
    bias_hides: bool
    key_range: list[list[list[int]]] | None

    @property
    def hides(self) -> bool:
        """Whether any pair may be hidden."""
        return self.band != MaskSpec() or self._hides_beyond_band

    @property
    def plain(self) -> bool:
        """Whether there is nothing but the band."""
        return not self.extras.given() and self.dropout_p == 0

    @property
    def padded(self) -> bool:
        """Whether there is nothing but the band and a mask of keys, the same for all queries."""
        given = self.extras.given().keys() - {"key_range", "query_range"}
        mask = self.extras.mask
        return given == {"mask"} and mask is not None and mask.shape[2] == 1 and self.dropout_p == 0

    @property
    def _hides_beyond_band(self) -> bool:
        return self.extras.mask is not None or self.extras.query_segments is not None or self.bias_hides

    @property
    def block(self) -> int:
        scores = self.batch * self.kv_heads * self.group * self.q_len * self.kv_len
        return max(1, self.q_len) if self.q_len <= SHORT and scores <= TILE_ELEMENTS else BLOCK

    def parts(self) -> Iterator[Part]:
        """Parts whose tiles fit ``TILE_ELEMENTS``."""
        block, width = self.block, self.kv_len
        if self.band.lower is not None and self.band.upper is not None:
            width = min(width, self.band.upper - self.band.lower + block)
        fits = max(1, TILE_ELEMENTS // max(1, self.group * block * width))
        heads = min(self.kv_heads, fits)
        batches = max(1, fits // max(1, heads)) if heads == self.kv_heads else 1
        varying = (self.extras.mask, self.extras.query_segments, self.extras.key_segments)
        if self.kv_len > SHORT and any(x is not None and x.shape[0] > 1 for x in varying):
            batches = 1  # then each batch entry skips what it alone doesn't see
        for b in range(0, self.batch, batches):
            for h in range(0, self.kv_heads, heads):
                stop = min(self.kv_heads, h + heads)
                yield Part(slice(b, b + batches), slice(h * self.group, stop * self.group), slice(h, stop))

    def tiles(self, part: Part, exact: bool) -> Iterator[Tile]:
        """Tiles that cover all queries; ``exact`` makes them one query high."""
        for a, b in ((0, self.rows.start), (self.rows.stop, self.q_len)):
            if a < b:
                yield Tile(a, b, 0, 0)
        block = 1 if exact else self.block
        for i0 in range(self.rows.start, self.rows.stop, block):
            i1 = min(self.rows.stop, i0 + block)
            j0 = 0 if self.band.lower is None else max(0, i0 + self.band.lower)
            j1 = self.kv_len if self.band.upper is None else min(self.kv_len, i1 + self.band.upper)
            if self.key_range is not None:
                entries = self.key_range[part.batch] if len(self.key_range) > 1 else self.key_range
                spans = [span for e in entries for span in e[i0 // RANGE_BLOCK : (i1 - 1) // RANGE_BLOCK + 1]]
                j0 = max(j0, min(start for start, _ in spans))
                j1 = min(j1, max(stop for _, stop in spans))
            yield self._trim(part, Tile(i0, i1, j0, j1))

    def _trim(self, part: Part, tile: Tile) -> Tile:
        """The tile without the outer keys that none of its queries sees."""
        if tile.empty or not self._hides_beyond_band:
            return tile
        hidden = self._hidden(part, tile)
        seen = (~hidden).flatten(0, -2).any(0).nonzero()
        if len(seen) == 0:
            return Tile(tile.i0, tile.i1, 0, 0)
        first, last = int(seen[0]), int(seen[-1])
        hidden = hidden[..., first : last + 1]
        j0, j1 = tile.j0 + first, tile.j0 + last + 1
        return Tile(tile.i0, tile.i1, j0, j1, hidden if bool(hidden.any()) else None, in_band=True)

    def _hidden(self, part: Part, tile: Tile) -> Tensor:
        rows, columns = slice(tile.i0, tile.i1), slice(tile.j0, tile.j1)
        extras = self.extras
        parts = []
        if extras.mask is not None:
            parts.append(~cut(extras.mask, part, tile))
        if extras.query_segments is not None and extras.key_segments is not None:
            of_queries, of_keys = (
                x if x.shape[0] == 1 else x[part.batch] for x in (extras.query_segments, extras.key_segments)
            )
            parts.append(of_queries[:, None, rows, None] != of_keys[:, None, None, columns])
        if extras.bias is not None and self.bias_hides:
            parts.append(cut(extras.bias, part, tile) == -math.inf)
        if self.band != MaskSpec():
            distance = torch.arange(tile.j0, tile.j1) - torch.arange(tile.i0, tile.i1).unsqueeze(1)
            if self.band.lower is not None:
                parts.append((distance < self.band.lower)[None, None])
            if self.band.upper is not None:
                parts.append((distance > self.band.upper)[None, None])
        hidden = reduce(torch.logical_or, parts)
        return hidden.expand(*hidden.shape[:3], tile.j1 - tile.j0)

    def fold(self, x: Tensor) -> Tensor:
        """[b, heads, n, d] -> [b * key heads, group * n, d] in the compute dtype; the heads of a group become rows."""
        b, heads, n, d = x.shape
        return x.to(self.dtype).reshape(b * heads // self.group, self.group * n, d)

    def unfold(self, x: Tensor, part: Part, tile: Tile) -> Tensor:
        """A view [b, heads, queries, width] of a folded tensor [b * key heads, group * queries, width]."""
        return x.view(-1, part.heads.stop - part.heads.start, tile.i1 - tile.i0, x.shape[-1])

    def hide(self, scores: Tensor, part: Part, tile: Tile, fill: float) -> None:
        """Overwrite what isn't visible; for a band, touching only the columns that some row of the tile doesn't see."""
        view = self.unfold(scores, part, tile)
        if tile.in_band:
            if tile.hidden is not None:
                view.masked_fill_(tile.hidden, fill)
            return
        rows = torch.arange(tile.i0, tile.i1).unsqueeze(1)
        if self.band.upper is not None and (first := max(tile.j0, tile.i0 + self.band.upper + 1)) < tile.j1:
            hidden = torch.arange(first, tile.j1) > rows + self.band.upper
            view[..., first - tile.j0 :].masked_fill_(hidden, fill)
        if self.band.lower is not None and (last := min(tile.j1, tile.i1 - 1 + self.band.lower)) > tile.j0:
            hidden = torch.arange(tile.j0, last) < rows + self.band.lower
            view[..., : last - tile.j0].masked_fill_(hidden, fill)

    def used(self, part: Part, tile: Tile) -> Tensor | None:
        """What a product over the tile's keys may use, folded like the scores; None for everything."""
        if tile.hidden is None:
            return None
        batches = len(range(*part.batch.indices(self.batch)))
        heads = part.heads.stop - part.heads.start
        seen = ~tile.hidden.expand(batches, heads, tile.i1 - tile.i0, tile.j1 - tile.j0)
        return seen.reshape(-1, self.group * (tile.i1 - tile.i0), tile.j1 - tile.j0)

    def dropped(self, part: Part, tile: Tile) -> Tensor | None:
        """Bool [b, heads, queries, keys]: which probabilities dropout sets to 0; None without dropout."""
        if self.extras.rng_state is None:
            return None
        heads = self.kv_heads * self.group
        batches = torch.arange(*part.batch.indices(self.batch))
        head = batches[:, None] * heads + torch.arange(part.heads.start, part.heads.stop)
        return dropped(head, range(tile.i0, tile.i1), range(tile.j0, tile.j1), self.dropout_p, self.extras.rng_state)


def make_problem(query: Tensor, key: Tensor, spec: AttentionSpec, dropout_p: float, extras: Extras) -> Problem:
    """The problem of one call whose arguments are valid."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    band = support.effective_mask(spec.mask, q_len, kv_len)
    first = 0 if band.upper is None else min(q_len, max(0, -band.upper))
    stop = q_len if band.lower is None else min(q_len, kv_len - band.lower)
    if kv_len == 0 or (band.lower is not None and band.upper is not None and band.lower > band.upper):
        stop = first
    ranges = extras.key_range
    if ranges is None and extras.query_segments is not None:
        ranges = block_ranges(None, extras.query_segments, extras.key_segments, q_len, kv_len)[0]
    return Problem(
        batch,
        kv_heads,
        q_heads // kv_heads if kv_heads else 1,
        q_len,
        kv_len,
        band,
        1 / math.sqrt(head_dim) if spec.scale is None else spec.scale,
        spec.softcap,
        dropout_p,
        extras,
        torch.float64 if query.dtype is torch.float64 else torch.float32,
        range(first, max(first, stop)),
        extras.bias is not None and bool((extras.bias == -math.inf).any()),
        None if ranges is None else ranges.tolist(),
    )


def cut(x: Tensor, part: Part, tile: Tile) -> Tensor:
    """What a tensor that broadcasts to [B, Hq, Nq, Nk] has for the tile; dims of size 1 stay."""
    wanted = (part.batch, part.heads, slice(tile.i0, tile.i1), slice(tile.j0, tile.j1))
    return x[tuple(slice(None) if size == 1 else s for s, size in zip(wanted, x.shape, strict=True))]
