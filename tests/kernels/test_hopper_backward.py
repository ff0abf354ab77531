"""The Hopper backward without a GPU: its logic in the emulator, its code for sm_90a, the numbers the host computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.kernels import hopper as package
from flash_inductor.ops import hopper_backward
from flash_inductor.ops.hopper_backward import BackwardConfig, launches
from flash_inductor.ops.hopper_problem import Problem, heads_at_once, trim
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, largest_block_error, make_inputs

from .child import interpret
from .gluon_emulator import Descriptor, Pointer, launch, load
from .pretend import compile_for_hopper
from .test_compile import check_hopper, resources

_FOLDER = Path(package.__path__[0])
_PLAIN = BackwardConfig(stages=3)
_SHORT = BackwardConfig(stages=2, ds_buffers=1)
_AHEAD = BackwardConfig(stages=4, ahead=True)
_PARK = BackwardConfig(stages=3, park=True)
_CASES: dict[str, tuple[BackwardConfig, dict[str, Any], MaskSpec, float | None, bool]] = {
    # name: (config, sizes, band, softcap, deterministic)
    "full": (_PLAIN, {"q_len": 200, "kv_len": 333}, MaskSpec(), None, False),
    "full_short": (_SHORT, {"q_len": 256, "kv_len": 256}, MaskSpec(), None, False),
    "full_ahead": (_AHEAD, {"q_len": 200, "kv_len": 333}, MaskSpec(), None, False),
    "causal": (_PLAIN, {"q_len": 300, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), None, False),
    "causal_ahead": (_AHEAD, {"q_len": 300, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), None, False),
    "one_step": (_AHEAD, {"q_len": 1, "kv_len": 300}, MaskSpec(), None, False),
    "bottom_right": (_PLAIN, {"q_len": 150, "kv_len": 400}, MaskSpec(upper=250), None, False),
    "fewer_keys": (_AHEAD, {"q_len": 300, "kv_len": 130}, MaskSpec(upper=-170), None, False),
    "left": (_PLAIN, {"q_len": 400, "kv_len": 300}, MaskSpec(lower=-100), None, False),
    "both_sides": (_AHEAD, {"q_len": 300}, MaskSpec(-30, 40), None, False),
    "blind_and_unseen": (_PLAIN, {"q_len": 300, "kv_len": 500}, MaskSpec(-3, 20), None, False),
    "softcap": (_PLAIN, {"q_len": 150}, MaskSpec(upper=0), 2.0, False),
    "softcap_ahead": (_AHEAD, {"q_len": 300}, MaskSpec(upper=0), 2.0, False),
    "dim_128": (_PLAIN, {"q_len": 130, "head_dim": 128}, MaskSpec(upper=0), None, False),
    "dim_128_parked": (_PARK, {"q_len": 130, "head_dim": 128}, MaskSpec(upper=0), None, False),
    "dim_96_parked_in_turn": (_PARK, {"q_len": 300, "head_dim": 96}, MaskSpec(-100, 0), None, True),
    "ahead_parked": (replace(_AHEAD, park=True), {"q_len": 200, "kv_len": 333}, MaskSpec(), None, False),
    "dim_80": (_PLAIN, {"q_len": 130, "head_dim": 80, "v_head_dim": 72}, MaskSpec(upper=0), None, True),
    "dim_96_ahead": (_AHEAD, {"q_len": 130, "head_dim": 96}, MaskSpec(upper=0), None, False),
    "full_in_turn": (_PLAIN, {"q_len": 200, "kv_len": 333}, MaskSpec(), None, True),
    "causal_in_turn": (_AHEAD, {"q_len": 300, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), None, True),
    "left_in_turn": (_PLAIN, {"q_len": 600, "heads": 4, "kv_heads": 2}, MaskSpec(lower=-100), None, True),
    "window_in_turn": (_AHEAD, {"q_len": 500, "heads": 4, "kv_heads": 2}, MaskSpec(-130, 0), None, True),
    "both_sides_in_turn": (_PLAIN, {"q_len": 450, "kv_len": 400}, MaskSpec(-77, 60), None, True),
}


def _problem(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: MaskSpec,
    softcap: float | None = None,
    deterministic: bool = False,
    grad_lse: bool = True,
) -> Problem:
    query, key, value = inputs
    out, lse = attention_forward(query, key, value, AttentionSpec(None, mask, softcap))
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(query.dtype)
    grads = (torch.full_like(x, torch.nan) for x in inputs)
    return Problem(
        grad_out, torch.randn(lse.shape, generator=generator) if grad_lse else None, query, key, value,
        out.to(query.dtype), lse.float(), *grads, query.shape[3] ** -0.5, mask, softcap, deterministic,
    )  # fmt: skip


def _strict_turns(await_turn: Any, pass_turn: Any) -> dict[str, Any]:
    """Programs run one after the other here, so one that forgets to wait would go unnoticed."""
    awaited = set()

    def await_and_note(pointer: Pointer, turn: int) -> None:
        awaited.add((pointer.offset, turn))
        await_turn(pointer, turn)

    def check_and_pass(pointer: Pointer, turn: int) -> None:
        before = int(pointer.data[pointer.offset])
        if before and (before != turn - 1 or (pointer.offset, before) not in awaited):
            raise RuntimeError(f"turn {turn} did not wait for {before}")
        pass_turn(pointer, turn)

    return {"await_turn": await_and_note, "pass_turn": check_and_pass}


def _emulate(problem: Problem, config: BackwardConfig) -> None:
    """``backward`` with the first and the last kernel in plain torch."""
    visible = trim(problem)
    if visible is None:
        return
    main = launches(visible, config)[1]
    lse, delta, acc = (main.args[i].base for i in (4, 5, 6))
    acc.zero_()
    batch, heads, q_len, head_dim = visible.query.shape
    rows = (visible.grad_out.float() * visible.out.float()).sum(-1)
    if visible.grad_lse is not None:
        rows = rows - visible.grad_lse
    for target, source in ((lse, visible.lse * 1.4426950408889634), (delta, rows)):
        target.zero_()
        target[:, :q_len] = source.reshape(batch * heads, q_len)
    turns = main.args[9]
    descriptors = [Descriptor(x.base, x.block_shape) for x in main.args[:9]]
    constants = {k: v for k, v in main.constants.items() if k != "num_warps"}
    arguments = (*descriptors, None if turns is None else Pointer(turns.zero_()), *main.args[10:])
    names = load(_FOLDER / "backward_dq.py", _FOLDER / "backward.py")
    names.update(_strict_turns(names["await_turn"], names["pass_turn"]))
    launch(names["backward_kernel"], main.grid[0], *arguments, **constants)
    tiles = acc.view(batch, heads, -1, main.constants["DIM"] // 64, 8, 4, 8, 4, 2, 2)
    dq = tiles.permute(0, 1, 2, 5, 8, 6, 3, 4, 7, 9).reshape(batch, heads, visible.q_rows, -1)
    visible.grad_query.copy_(dq[:, :, :q_len, :head_dim] * problem.scale)


@pytest.mark.parametrize("name", _CASES)
def test_emulated(name: str) -> None:
    config, sizes, mask, softcap, deterministic = _CASES[name]
    inputs = make_inputs(**{"batch": 1, "heads": 2, "head_dim": 64, **sizes}, dtype=torch.bfloat16)
    problem = _problem(inputs, mask, softcap, deterministic)
    # Groups of one head, two, and all heads; the emulator runs programs in the order of their ids, so that a program
    # that waits for a later one is found.
    _emulate(problem, replace(config, heads_at_once=1 + len(name) % 3))
    grads = [problem.grad_query, problem.grad_key, problem.grad_value]
    spec = AttentionSpec(None, mask, softcap)
    args: dict[str, Any] = {"grad_out": problem.grad_out, "grad_lse": problem.grad_lse}
    assert_close_to_reference([None, None, *grads], *inputs, spec, **args)
    for got, want in zip(grads, attention_backward(args["grad_out"], args["grad_lse"], *inputs, spec), strict=False):
        assert largest_block_error(got, want) < 0.02


def test_what_is_not_seen_is_not_read() -> None:
    query, key, value = make_inputs(batch=1, heads=1, q_len=100, kv_len=300, head_dim=64, dtype=torch.bfloat16)
    mask = MaskSpec(lower=40, upper=60)
    problem = _problem((query, key, value), mask)
    expected = [x.clone() for x in (query, key, value)]
    for x in (key, value):
        x[:, :, :40] = torch.nan
        x[:, :, 160:] = torch.inf
    _emulate(problem, _PLAIN)
    grads = [problem.grad_query, problem.grad_key, problem.grad_value]
    assert not any(grad[:, :, :40].any() or grad[:, :, 160:].any() for grad in grads[1:])
    spec = AttentionSpec(None, mask)
    args: dict[str, Any] = {"grad_out": problem.grad_out, "grad_lse": problem.grad_lse}
    assert_close_to_reference([None, None, *grads], *expected, spec, **args)


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (MaskSpec(), (0, 100, 0, 300)),
        (MaskSpec(upper=0), (0, 100, 0, 100)),
        (MaskSpec(upper=-40), (40, 100, 0, 60)),
        (MaskSpec(lower=250), (0, 50, 250, 300)),
        (MaskSpec(-10, -5), (5, 100, 0, 95)),
        (MaskSpec(lower=5, upper=4), None),
        (MaskSpec(upper=-100), None),
        (MaskSpec(lower=300), None),
    ],
)
def test_trim(mask: MaskSpec, visible: tuple[int, int, int, int] | None) -> None:
    query, key = torch.zeros(1, 1, 100, 8), torch.zeros(1, 1, 300, 8)
    lse = torch.zeros(1, 1, 100)
    grads = [torch.full_like(x, torch.nan) for x in (query, key, key)]
    found = trim(Problem(query, None, query, key, key, query, lse, *grads, 1.0, mask, None, False))
    begin, end, k_begin, k_end = visible or (0, 0, 0, 0)
    for grad, first, last in zip(grads, (begin, k_begin, k_begin), (end, k_end, k_end), strict=True):
        assert grad[:, :, first:last].isnan().all()
        assert not grad[:, :, :first].any() and not grad[:, :, last:].any()
    assert (found is None) == (visible is None)
    if found is not None:
        assert (found.query.shape[2], found.lse.shape[2]) == (end - begin,) * 2
        assert found.key.shape[2] == found.grad_value.shape[2] == k_end - k_begin
        i, j = torch.arange(100)[:, None], torch.arange(300)[None]
        low, high = (-1000 if mask.lower is None else mask.lower), (1000 if mask.upper is None else mask.upper)
        seen = (low <= j - i) & (j - i <= high)
        rows, cols = torch.arange(end - begin)[:, None], torch.arange(k_end - k_begin)[None]
        still = torch.ones(end - begin, k_end - k_begin, dtype=torch.bool)
        if found.mask.lower is not None:
            still &= found.mask.lower <= cols - rows
        if found.mask.upper is not None:
            still &= cols - rows <= found.mask.upper
        assert torch.equal(still, seen[begin:end, k_begin:k_end])
        assert (found.mask == MaskSpec()) == bool(still.all())
        assert still.any(1).all() and still.any(0).all()


def test_heads_at_once_fill_waves_or_l2() -> None:
    assert heads_at_once(4, 16, 16, 4096, 4096, 128, True) * 4096 * 128 * 8 <= 50 << 20
    for sizes in ((4, 16, 16, 4096), (4, 32, 8, 4096), (2, 16, 16, 8192), (1, 16, 16, 16384)):
        at_once = heads_at_once(*sizes, sizes[-1], 128, False)
        assert at_once * sizes[-1] // 128 >= (256 if sizes[1] == sizes[2] else 128), sizes
    assert heads_at_once(1, 1, 1, 100, 100, 64, False) == 1


# name: (head dim, lower, upper, softcap, length of keys, dtype, deterministic, bytes a thread may spill)
_COMPILED: dict[str, tuple[int, int | None, int | None, float | None, int, torch.dtype, bool, int]] = {
    "64_causal": (64, None, 0, None, 1024, torch.bfloat16, False, 16),
    "64_window_fp16_in_turn": (64, -99, 0, None, 1000, torch.float16, True, 32),
    "64_causal_softcap": (64, None, 0, 20.0, 1024, torch.bfloat16, False, 32),
    "96_causal": (96, None, 0, None, 1024, torch.bfloat16, False, 0),
    "128": (128, None, None, None, 1024, torch.bfloat16, False, 128),
    "128_window_in_turn": (128, -99, 0, None, 1000, torch.bfloat16, True, 128),
    "128_causal_softcap_fp16": (128, None, 0, 20.0, 1024, torch.float16, False, 144),
}


@pytest.mark.parametrize("name", _COMPILED)
def test_compiles(name: str) -> None:
    dim, lower, upper, softcap, kv_len, dtype, deterministic, spilled = _COMPILED[name]
    query, key = torch.empty(1, 2, 1024, dim, dtype=dtype), torch.empty(1, 2, kv_len, dim, dtype=dtype)
    lse, mask = torch.empty(1, 2, 1024), MaskSpec(lower, upper)
    problem = Problem(query, None, query, key, key, query, lse, query, key, key, 0.1, mask, softcap, deterministic)
    visible = trim(problem)
    assert visible is not None
    main = launches(visible)[1]
    found = resources(compile_for_hopper(main.kernel, main.args, main.constants))
    check_hopper(found, spilled)


@pytest.mark.parametrize("which", [0, 2], ids=["prepare", "finish"])
def test_loads_are_wide(which: int) -> None:
    query = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16).transpose(1, 2)
    lse = torch.empty(1, 4, 256)
    problem = Problem(query, None, *[query] * 4, lse, *[query] * 3, 0.1, MaskSpec(), None, True)
    call = launches(problem)[which]
    ptx = compile_for_hopper(call.kernel, call.args, call.constants).asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


def test_kernels_around_in_the_interpreter() -> None:
    assert set(interpret("interpret_around.py").values()) == {""}


def test_configs_fit() -> None:
    for width in range(8, 129, 8):
        assert width <= sum(hopper_backward.columns(width)) < width + (32 if width > 64 else 64)
    for c in hopper_backward._CONFIGS.values():
        assert 128 * (2 * c.main_registers + c.dq_registers) <= 65536
        assert c.stages >= 2 + c.ahead
