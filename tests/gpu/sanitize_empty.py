"""Two warp-specialised Gluon kernels that do nothing: what compute-sanitizer says of them, Triton brings about itself.

They are split as the Hopper forward is with two warpgroups: a default partition, one of four warps and one of one warp,
each with its registers.  Neither keeps data of its own in shared memory; one has barriers there, made as our kernels
make theirs: before ``gl.warp_specialize``, with no fence but what Triton adds.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

OPTIONS = {"num_warps": 4, "maxnreg": 168}  # what 3 * 128 threads can have


@gluon.jit
def _store(out_ptr, value, INDEX: gl.constexpr):
    gl.store(out_ptr + INDEX, value)


@gluon.jit
def stores_kernel(out_ptr, value):
    """Each partition stores ``value`` to an address of its own (int32 [3])."""
    gl.warp_specialize([
        (_store, (out_ptr, value, 0)),
        (_store, (out_ptr, value, 1)),
        (_store, (out_ptr, value, 2)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _receive(out_ptr, value, full, empty, INDEX: gl.constexpr):
    mbarrier.wait(full, 0)
    gl.store(out_ptr + INDEX, value)
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _send(out_ptr, value, full, empty, INDEX: gl.constexpr):
    mbarrier.arrive(full, count=1)
    mbarrier.wait(empty, 0)
    gl.store(out_ptr + INDEX, value)


@gluon.jit
def handshake_kernel(out_ptr, value):
    """The same, the last partition opening a barrier that the others wait at, and waiting at one for them."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    gl.warp_specialize([
        (_receive, (out_ptr, value, full, empty, 0)),
        (_receive, (out_ptr, value, full, empty, 1)),
        (_send, (out_ptr, value, full, empty, 2)),
    ], [4, 1], [240, 24])  # fmt: skip


KERNELS: dict[str, Any] = {"stores": stores_kernel, "handshake": handshake_kernel}


def launch(name: str, blocks: int = 4) -> None:
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    KERNELS[name][(blocks,)](out, 7, **OPTIONS)
    assert out.tolist() == [7, 7, 7]
