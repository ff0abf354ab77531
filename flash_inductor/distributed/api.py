"""``ContextParallel``: attention over a sequence that the ranks of a process group share."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..functional import window_sides
from .exchange import Exchange
from .layout import LAYOUTS, Span, chunks, local_length
from .library import context_attn
from .plan import METHODS

Int = Any  # int | torch.SymInt


class ContextParallel:
    """Attention over a sequence of which each rank holds a part.

        context = flash_inductor.distributed.ContextParallel(mesh["context"])
        tokens = context.shard(tokens, dim=1)                   # before the model: [batch, length] -> its part
        positions = context.positions(length, tokens.device)    # for rotary embeddings
        out = context.attention(q, k, v, is_causal=True)        # in the model: q, k, v of the part

    Make it outside compiled functions; its methods work inside, eager and compiled, forward and backward.

    Args:
        group: a one-dimensional DeviceMesh, a ProcessGroup, or None for all ranks. Any backend of torch.distributed
            that has all-to-all (gloo, NCCL).
        layout: "zigzag" gives each rank an early and a late part, which balances causal attention; "contiguous" one
            part, which is better for sliding windows (keys come from neighbours only) and for full attention.
        method: "ring" computes with the keys of one rank while those of the next are on their way, "gather" gets all
            keys first and computes once; "auto" takes the faster by a model of the machine (see cost.py).

    Raises:
        TypeError, ValueError: an argument that isn't what is said above.
    """

    def __init__(self, group: Any = None, *, layout: str = "zigzag", method: str = "auto") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
        if method not in (*METHODS, "auto"):
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, auto, got {method!r}")
        self.layout = layout
        self.method = method
        self._group = _process_group(group)
        self.name: str = self._group.group_name
        self.rank = dist.get_rank(self._group)
        self.ranks = dist.get_world_size(self._group)

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        length: Int | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        window_size: Int | tuple[Int | None, Int | None] | None = None,
        softcap: float | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        length: Int | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        window_size: Int | tuple[Int | None, Int | None] | None = None,
        softcap: float | None = None,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        length: Int | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        window_size: Int | tuple[Int | None, Int | None] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """This rank's rows of :func:`flash_inductor.attention` over the whole sequence.

        A collective: all ranks call it, in the same order, with the same options and, but for the share of positions,
        the same shapes and dtypes; the same inputs need gradients on all.

        Args:
            query: [batch, heads, this rank's positions, D], any strides.
            key: [batch, key heads, this rank's positions, D]; only key heads travel.
            value: [batch, key heads, this rank's positions, Dv].
            length: of the whole sequence; None if all ranks hold as much as this one.
            scale: this and the options after it as in :func:`flash_inductor.attention`; distances are of positions in
                the whole sequence.

        Returns:
            out [batch, heads, this rank's positions, Dv]; with ``return_lse`` also the log-sum-exp, differentiable.

        Raises:
            TypeError, ValueError, NotImplementedError: as :func:`flash_inductor.attention`; ValueError also if this
                rank doesn't hold its share of ``length``. Other ranks then wait for this one until the process group's
                timeout, after which they raise too.
            RuntimeError: a rank failed or didn't come in time.
        """
        left, right = window_sides(window_size)
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out_and_lse = context_attn(
            query,
            key,
            value,
            group=self.name,
            length=query.shape[2] * self.ranks if length is None else length,
            layout=self.layout,
            method=self.method,
            scale=scale,
            is_causal=is_causal,
            window_left=left,
            window_right=None if is_causal else right,
            softcap=softcap,
        )
        return out_and_lse if return_lse else out_and_lse[0]

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that every rank has whole: its positions along ``dim``, differentiable."""
        spans = chunks(x.shape[dim], self.ranks, self.rank, self.layout)
        parts = [x.narrow(dim, span.start, span.size) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [this rank's positions]: where in a sequence of ``length`` they are."""
        spans = chunks(length, self.ranks, self.rank, self.layout)
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """The whole tensor from all ranks' parts, on every rank; for results, without gradients. A collective."""
        length = x.shape[dim] * self.ranks if length is None else length
        rows = x.movedim(dim, -1).reshape(1, 1, -1, x.shape[dim]).transpose(2, 3)  # [1, 1, positions, the rest]
        held = [local_length(length, self.ranks, rank, self.layout) for rank in range(self.ranks)]
        if rows.shape[2] != held[self.rank]:
            raise ValueError(f"x: expected {held[self.rank]} positions in dim {dim}, got {rows.shape[2]}")
        send = {rank: [Span(0, held[self.rank])] for rank in range(self.ranks)}
        came = Exchange(self._group, [rows], send, dict(enumerate(held))).wait()
        whole = rows.new_empty((1, 1, length, rows.shape[3]))
        for rank in range(self.ranks):
            at = 0
            for span in chunks(length, self.ranks, rank, self.layout):
                whole[:, :, span.start : span.stop] = came[rank][0].narrow(2, at, span.size)
                at += span.size
        rest = list(x.movedim(dim, -1).shape[:-1])
        return whole[0, 0].transpose(0, 1).reshape(*rest, length).movedim(-1, dim)


def _process_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialised; call init_process_group or use torchrun")
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(f"group: expected a mesh of one dim, got {group.ndim} ({names}); pass mesh[name]")
        return group.get_group()
    raise TypeError(f"group: expected a DeviceMesh, a ProcessGroup or None, got {type(group).__name__}")
