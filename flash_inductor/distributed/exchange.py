"""Sending rows of keys and values between ranks: one all-to-all with a size for each pair of ranks.

With NCCL that is a group of sends and receives of the sizes that aren't 0, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Span

Rows = Sequence[Span]


class Exchange:
    """Rows of some tensors [batch, heads, rows, dim] on their way; alike in all but heads and dim.

    Args:
        group: the ranks. All of them start the same exchanges in the same order.
        tensors: what the rows are of, on this rank.
        send: which rows go to which rank of the group.
        receive: how many rows come from which rank.
    """

    def __init__(
        self, group: Any, tensors: Sequence[Tensor], send: Mapping[int, Rows], receive: Mapping[int, int]
    ) -> None:
        ranks = dist.get_world_size(group)
        first = tensors[0]
        self._shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in tensors]
        of_row = sum(batch * heads * dim for batch, heads, dim in self._shapes)
        rows_out = [sum(span.size for span in send.get(rank, ())) for rank in range(ranks)]
        self._rows_in = [receive.get(rank, 0) for rank in range(ranks)]
        packed = first.new_empty(sum(rows_out) * of_row)
        for rank, block in zip(range(ranks), packed.split([n * of_row for n in rows_out]), strict=True):
            if rows_out[rank]:
                for x, into in zip(tensors, self._views(block, rows_out[rank]), strict=True):
                    _copy_rows(x, send[rank], into)
        self._split = [n * of_row for n in self._rows_in]
        self._arriving = first.new_empty(sum(self._split))
        self._work = dist.all_to_all_single(
            self._arriving, packed, self._split, [n * of_row for n in rows_out], group=group, async_op=True
        )
        self._packed = packed  # must live until the transfer is over

    def wait(self) -> dict[int, list[Tensor]]:
        """What came, by rank: for each of the tensors contiguous rows [batch, heads, rows, dim].

        On a GPU only later work on the current stream waits.  Raises what the transport raises if a rank failed or
        did not come within the timeout of the group.
        """
        if self._work is not None:
            self._work.wait()
        blocks = self._arriving.split(self._split)
        return {rank: self._views(blocks[rank], rows) for rank, rows in enumerate(self._rows_in) if rows}

    def _views(self, block: Tensor, rows: int) -> list[Tensor]:
        sizes = [batch * heads * rows * dim for batch, heads, dim in self._shapes]
        return [
            part.view(batch, heads, rows, dim)
            for part, (batch, heads, dim) in zip(block.split(sizes), self._shapes, strict=True)
        ]


def _copy_rows(x: Tensor, spans: Rows, into: Tensor) -> None:
    at = 0
    for span in spans:
        into.narrow(2, at, span.size).copy_(x.narrow(2, span.start, span.size))
        at += span.size


def rows_of(x: Tensor, span: Span, dim: int = 2) -> Tensor:
    """A view of some rows; the tensor itself if they are all of them."""
    return x if span == (0, x.shape[dim]) else x.narrow(dim, span.start, span.size)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Rows after each other, without a copy if there is nothing to join."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
