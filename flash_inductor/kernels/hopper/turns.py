# mypy: disallow-untyped-defs=False
"""Turns: numbers in global memory that order what thread blocks add to one place, for sums that repeat bit for bit.

A block may only wait for blocks with smaller program ids: the hardware starts those first, so nobody waits for ever.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as core

_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7


@core.builtin
def _stores_done(_semantic=None):
    """Until this thread's TMA stores are in global memory; ``tma.store_wait`` only waits until they were read."""
    asm = "cp.async.bulk.wait_group 0; mov.u32 $0, 0;"
    core.inline_asm_elementwise(asm, "=r", [], core.int32, False, 1, _semantic=_semantic)


@gluon.jit
def await_turn(turn_ptr, turn):
    """Until ``turn_ptr`` holds ``turn`` or more: what was added before it was set comes before what is added now.

    Every thread polls, so that no barrier is needed after it.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred waiting; .reg .b32 now; again: ld.acquire.gpu.global.b32 now, [$1]; setp.lt.s32 waiting, now, $2;"
        " @waiting bra again; fence.proxy.async; mov.b32 $0, now; }",
        "=r,l,r", [turn_ptr.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(turn_ptr, turn):
    """Set ``turn_ptr`` when all that this warpgroup has added is in global memory; shared memory is free then, too."""
    _stores_done()
    _thread_barrier()
    gl.atomic_xchg(turn_ptr, turn, sem="release", scope="gpu")
