"""Sums over keys of which each attention call has seen a part."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import empty_like_layout
from .exchange import rows_of
from .layout import Span


class Merge:
    """Output and log-sum-exp over all keys, from those over parts of them.

        lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2

    in float32 (float64 for float64 inputs); rows that no call has seen have out 0 and lse -inf.
    """

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._query = query
        self._shape = (*query.shape[:3], value.shape[3])
        self._wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        """Take in a call for these rows of the queries."""
        if self._out is None or self._lse is None:
            if rows == (0, self._shape[2]):
                self._out, self._lse = out, lse  # often all there is
                return
            self._out = self._query.new_zeros(self._shape, dtype=self._wide)
            self._lse = self._query.new_full(self._shape[:3], -torch.inf, dtype=self._wide)
        self._out = self._out.to(self._wide)
        old_out, old_lse = rows_of(self._out, rows), rows_of(self._lse, rows)
        new_lse = torch.logaddexp(old_lse, lse)
        at = new_lse.masked_fill(new_lse == -torch.inf, 0.0)  # exp(-inf - 0) is 0, where -inf - -inf is not a number
        old_out.mul_(torch.exp(old_lse - at).unsqueeze(-1))
        old_out.addcmul_(out.to(self._wide), torch.exp(lse - at).unsqueeze(-1))
        old_lse.copy_(new_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype and layout of the op's, lse contiguous."""
        if self._out is None or self._lse is None:
            self._out = self._query.new_zeros(self._shape, dtype=self._wide)
            self._lse = self._query.new_full(self._shape[:3], -torch.inf, dtype=self._wide)
        out = empty_like_layout(self._query, self._shape)
        if self._out.dtype == out.dtype and self._out.stride() == out.stride():
            return self._out, self._lse
        return out.copy_(self._out), self._lse


class Total:
    """A sum of gradients that come for some rows at a time, in float32 (float64 for float64 inputs)."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._shape = like.shape
        self._wide = torch.float64 if like.dtype is torch.float64 else torch.float32
        self._sum: Tensor | None = None
        self._owned = False

    def add(self, rows: Span, grad: Tensor) -> None:
        """Add to these rows."""
        if self._sum is None:
            if rows == (0, self._shape[2]):
                self._sum = grad  # often all there is; a second addend copies it
                return
            self._sum, self._owned = self._like.new_zeros(self._shape, dtype=self._wide), True
        if not self._owned:
            self._sum, self._owned = self._sum.to(self._wide, copy=True), True
        rows_of(self._sum, rows).add_(grad)

    def result(self) -> Tensor:
        """The sum in the dtype of the tensor that it is a gradient of."""
        if self._sum is None:
            return self._like.new_zeros(self._shape)
        return self._sum.to(self._like.dtype)

    def result_like_op(self) -> Tensor:
        """The sum in the memory layout of the op's gradients."""
        found, wanted = self.result(), empty_like_layout(self._like, self._like.shape)
        return found if found.stride() == wanted.stride() else wanted.copy_(found)
