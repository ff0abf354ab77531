"""benchmarks/attention.py and what it is made of: on the CPU, at toy sizes, and with children that only pretend."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flash_inductor
from flash_inductor.reference import attention_backward, attention_forward

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import attention
from grid import cases, summary, supervise
from grid.store import Store

from flash_inductor.bench import bounds, check, impls, measure, timing
from flash_inductor.bench.case import Case

BENCHMARKS = Path(attention.__file__).parent
TINY = cases.tiny_grid()
HEADER = {"command": "python x", "device": "toy", "versions": {"torch": "2"}, "commit": "abc"}


# --- cases


def test_grid_has_what_it_promises() -> None:
    grid = cases.grid()
    names = [str(case) for case in grid]
    assert len(set(names)) == len(names)
    assert names[: len(cases.PUBLISHED)] == list(cases.PUBLISHED)  # the anchors come first
    assert len([figure for peers in cases.PUBLISHED.values() for figure in peers["fa4"]]) == 28
    assert {(c.head_dim, c.value_dim) for c in grid} >= {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}
    for dim in (64, 128):
        for causal in (True, False):
            lengths = {c.length for c in grid if (c.group, c.head_dim, c.causal) == ("lengths", dim, causal)}
            assert lengths == {512, 1024, 2048, 4096, 8192, 16384, 32768, 65536}
    assert any(c.deterministic and c.length == 8192 and c.head_dim == 128 and c.causal for c in grid)
    assert any(c.dtype == "float16" for c in grid)
    assert [c.importance for c in grid] == sorted(c.importance for c in grid)


@pytest.mark.parametrize(
    "case", [*TINY, Case("x", 2, 4, 2, 50, 8, True, 7), Case("x", 1, 1, 1, 9, 8, False, 20)], ids=str
)
def test_flops_count_visible_pairs(case: Case) -> None:
    mask = impls.dense_mask(case, "cpu")
    pairs = case.length**2 if mask is None else int(mask.sum())
    assert case.pairs == pairs
    total = 2 * case.batch * case.heads * pairs
    assert case.flops["forward"] == total * (case.head_dim + case.value_dim)
    assert case.flops["backward"] == total * (3 * case.head_dim + 2 * case.value_dim)


def test_select_finds_names_and_says_what_is_wrong() -> None:
    assert {c.softcap for c in cases.select(cases.grid(), r"anchors.*softcap")} == {50.0}
    with pytest.raises(ValueError, match="no case matches 'D7'"):
        cases.select(cases.grid(), "D7")
    with pytest.raises(ValueError, match="no regular expression"):
        cases.select(cases.grid(), "(")


def test_partition_gives_each_task_once_and_keeps_common_kernels_together() -> None:
    grid = cases.grid()
    tasks = [(case, name) for case in grid for name in ("flex", "ours", "ours:gluon")]
    shares = cases.partition(tasks, {"flex": 12.0, "ours": 8.0, "ours:gluon": 8.0}, 5)
    assert sorted(map(str, itertools.chain(*shares))) == sorted(map(str, tasks))
    one = [i for i, share in enumerate(shares) for case, name in share
           if name != "flex" and (case.head_dim, case.causal, case.window, case.softcap, case.group)
           == (64, True, None, None, "lengths")]  # fmt: skip
    assert len(one) > 2 and len(set(one)) == 1
    assert all(shares)


# --- checks


@pytest.mark.parametrize("chunk", [2**27, 40 * 100])
@pytest.mark.parametrize(
    "case",
    [
        Case("x", 2, 4, 2, 100, 8, True, None, 3.0, dtype="float32"),
        Case("x", 1, 2, 1, 100, 8, True, 13, v_head_dim=16, dtype="float32", layout="bnhd"),
        Case("x", 1, 2, 2, 100, 8, False, 30, 2.0, dtype="float32"),
        Case("x", 1, 2, 2, 100, 8, False, dtype="float32"),
    ],
    ids=str,
)
def test_reference_is_the_specification(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHUNK", chunk)
    *qkv, grad_out = impls.inputs(case, "cpu")
    expected = check.reference(case, [*qkv, grad_out])
    assert expected.dtype == torch.float64 and len(expected.heads) == case.batch * case.kv_heads
    spec = flash_inductor.AttentionSpec(mask=flash_inductor.MaskSpec(*case.band), softcap=case.softcap)
    double = [x.double() for x in qkv]
    out, _ = attention_forward(*double, spec)
    grads = attention_backward(grad_out.double(), None, *double, spec)
    errors = check.errors(case, expected, [out, *grads[:3]])
    assert max(errors.values()) < 1e-6, errors


def test_errors_see_one_wrong_head_and_what_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    case = TINY[1]
    tensors = impls.inputs(case, "cpu")
    expected = check.reference(case, tensors)
    results = [x.clone() for x in measure.Prepared(case, "stock", tensors, "cpu").results()]
    assert max(check.errors(case, expected, results).values()) < 1e-5
    results[2][0, 1, 3] += 1.0
    errors = check.errors(case, expected, results)
    assert errors["key"] > 1e-2 and max(errors[n] for n in ("out", "query", "value")) < 1e-5
    monkeypatch.setattr(check, "MOST_FLOPS", 0)  # the last head only
    assert check.chosen_heads(case) == [(0, 1)]
    results[0][0, 0, 0, 0] = torch.nan
    assert check.errors(case, check.reference(case, tensors), results)["out"] == float("inf")


def test_heads_to_check_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("x", 4, 8, 8, 64, 16, True)
    monkeypatch.setattr(check, "MOST_FLOPS", 3.5 * sum(case.flops.values()) / 32)
    heads = check.chosen_heads(case)
    assert len(heads) == 3 and heads[0] == (0, 0) and heads[-1] == (3, 7)


def test_bounds() -> None:
    peers = [{"out": 2e-3}, {"out": 3e-3}]
    assert bounds.inaccurate({"out": 3.9e-3}, peers, "bfloat16") == {}
    assert bounds.inaccurate({"out": 4.1e-3}, peers, "bfloat16") == {"out": pytest.approx(2.05)}
    assert bounds.inaccurate({"out": 5e-3}, [], "bfloat16") == {}
    assert "out" in bounds.inaccurate({"out": 5e-2}, [], "bfloat16")
    assert bounds.inaccurate({"out": 1e-6}, [{"out": 1e-7}], "float32") == {}  # both are rounding
    for bad in (float("nan"), float("inf"), 0.5):
        assert bounds.is_wrong("bfloat16", {"out": 1e-3, "key": bad})
        assert bounds.inaccurate({"out": bad}, peers, "bfloat16")
    assert not bounds.is_wrong("bfloat16", {"out": 4e-3})


@pytest.mark.parametrize(
    "band", [(True, None), (True, 128), (True, 300), (False, 64), (False, 129), (True, 1024)], ids=str
)
def test_block_mask_is_that_of_flex_attention(band: tuple[bool, int | None]) -> None:
    case = Case("x", 1, 1, 1, 512, 16, *band)
    mine = impls.block_mask(case, "cpu")
    lower, upper = case.band

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j - i >= (-512 if lower is None else lower)) & (j - i <= (512 if upper is None else upper))

    theirs = create_block_mask(visible, None, None, 512, 512, device="cpu")
    assert mine is not None
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    at = torch.arange(512)
    dense = mine.mask_mod(0, 0, at[:, None], at[None, :])
    assert torch.equal(dense, impls.dense_mask(case, "cpu"))
    assert impls.block_mask(Case("x", 1, 1, 1, 512, 16, False), "cpu") is None


# --- timing


class FakeClock:
    """Each call takes the number of milliseconds it returns."""

    def __init__(self) -> None:
        self.log: list[tuple[float, int]] = []

    def times(self, call: Any, count: int) -> list[float]:
        self.log.append((call(), count))
        return [call()] * count


class FakeGpu:
    """As much of torch as the GPU clock uses: a queue that runs behind the host, in milliseconds."""

    int8 = torch.int8

    def __init__(self) -> None:
        self.cuda, self.now, self.slept = self, 0.0, []

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(L2_cache_size=1024)

    def current_device(self) -> int:
        return 0

    def empty(self, size: int, dtype: Any, device: str) -> torch.Tensor:
        assert device == "cuda" and size > 1024  # more than the cache holds
        return torch.empty(size, dtype=dtype)

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles / 1e6)
        self.now += cycles / 1e6

    def synchronize(self) -> None:
        pass

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_gpu_sleeps_for_as_long_as_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(timing, "torch", gpu)
    clock = timing.GpuClock()
    assert clock.cycles_per_ms == pytest.approx(1e6)

    def call() -> None:
        time.sleep(2e-3)  # the host's part
        gpu.now += 0.25  # the kernel's

    assert clock.times(call, 4) == pytest.approx([0.25] * 4)
    clock.times(call, 4)
    assert 4 * 2.0 < gpu.slept[-1] <= clock.LONGEST_SLEEP_MS
    clock.times(call, 1000 // 50)
    assert gpu.slept[-1] == pytest.approx(clock.LONGEST_SLEEP_MS)


def test_interleaving_takes_turns_and_gives_long_calls_less() -> None:
    clock = FakeClock()
    found = timing.interleave({"a": lambda: 1.0, "b": lambda: 2.0, "slow": lambda: 100.0}, clock, 5, 40.0)
    assert {name: len(ms) for name, ms in found.items()} == {"a": 5, "b": 5, "slow": 3}
    turns = clock.log[6:]  # after the estimates
    assert turns[:3] == [(1.0, 8), (2.0, 4), (100.0, 1)]
    assert turns[3:6] == [(2.0, 4), (100.0, 1), (1.0, 8)]  # another one begins
    assert found["b"] == [2.0] * 5


# --- the run


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    out = tmp_path / "run.json"
    attention.main(["--device", "cpu", "--tiny", "--in-process", "--rep", "1", "--out", str(out), *options])
    return json.loads(out.read_text())


def test_tiny_run_checks_and_times_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run(monkeypatch, tmp_path)
    assert [c["name"] for c in data["cells"]] == [str(case) for case in TINY]
    for c in data["cells"]:
        assert c["checked_against"] == "float64, 2/2 key heads"
        for name in ("ours", "stock"):
            found = c["impls"][name]
            assert max(found["errors"].values()) < 1e-5
            assert all(found[part]["tflops"] > 0 for part in summary.PARTS)
        assert "unsupported" in c["impls"]["ours:gluon"] and "unsupported" in c["impls"]["flex"]
        assert summary.accuracy_failures(c) == []
    assert summary.columns(data["cells"])[:2] == ["ours", "stock"]
    assert "ratios of speed" in capsys.readouterr().out
    # Resumed, it measures only what is missing.
    monkeypatch.setattr(measure, "measure", lambda case, *_, **__: pytest.fail(f"measured {case} again"))
    assert run(monkeypatch, tmp_path, "--resume")["cells"] == data["cells"]


def test_failures_of_one_leave_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(case: Case, device: str) -> impls.Attention:
        right = impls.stock(case, device)
        return lambda q, k, v: right(q, k, v) * 1.1

    def raising(case: Case, device: str) -> impls.Attention:
        raise RuntimeError("no kernel today")

    monkeypatch.setitem(impls.IMPLEMENTATIONS, "cudnn", wrong)
    monkeypatch.setitem(impls.IMPLEMENTATIONS, "flash", raising)
    (c,) = run(monkeypatch, tmp_path, "--select", "softcap", "--impls", "ours,stock,cudnn,flash")["cells"]
    assert c["impls"]["cudnn"]["error"] == "wrong results" and "forward" not in c["impls"]["cudnn"]
    assert c["impls"]["flash"]["error"] == "RuntimeError: no kernel today"
    assert "forward" in c["impls"]["ours"] and summary.peers(c) == ["stock"]


def test_an_implementation_that_breaks_again_and_again_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store(tmp_path / "run.json", attention.header("cpu", []))
    for i in range(attention.MOST_BREAKS):
        store.add_broken(f"case {i}", "flash", "hung for 90 s")
    store.add_broken(str(TINY[0]), "stock", "died with exit code 1")
    options = ("--resume", "--select", "D16 causal fp32", "--impls", "ours,stock,flash")
    (c,) = run(monkeypatch, tmp_path, *options)["cells"]
    assert c["impls"]["flash"] == {"error": "left out: it broke on 3 cases"}
    assert c["impls"]["stock"] == {"error": "died with exit code 1"}
    assert "forward" in c["impls"]["ours"]


def test_errors_that_end_a_process() -> None:
    assert measure.is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not measure.is_fatal(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_deterministic_cases_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(TINY[0], deterministic=True)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    seen = []

    def noisy(case: Case, device: str) -> impls.Attention:
        seen.append(torch.are_deterministic_algorithms_enabled())
        right = impls.stock(case, device)
        return lambda q, k, v: right(q, k, v) * (1 + 1e-6 * torch.rand(()))

    monkeypatch.setitem(impls.IMPLEMENTATIONS, "flash", noisy)
    c = measure.measure(case, ["stock", "flash"], "cpu", timing.CpuClock(), total_ms=0.1)
    assert (c["impls"]["stock"]["repeats"], c["impls"]["flash"]["repeats"]) == (True, False)
    assert seen == [True] and not torch.are_deterministic_algorithms_enabled()


def test_time_over_stops_before_the_next_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, "--budget", "0")["cells"] == []


def test_resuming_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    Store.open(path, HEADER, resume=False).save()
    assert Store.open(path, {**HEADER, "command": "python y"}, resume=True).data["command"] == "python x"
    with pytest.raises(ValueError, match="expected versions"):
        Store.open(path, {**HEADER, "versions": {"torch": "3"}}, resume=True)


# --- child processes

CHILD = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = {path!r}
from grid import supervise
from grid.store import Store
out, progress = Path(sys.argv[1]), Path(sys.argv[2])
store = Store(out, json.loads(out.read_text()))
for case in ("first", "second"):
    if any(c["name"] == case for c in store.data["cells"]):
        continue
    for impl in ("good", "hangs", "dies"):
        if (case, impl) in store.broken:
            continue
        supervise.tell(progress, case, impl)
        if impl == "hangs" and case == "first":
            time.sleep(600)
        if impl == "dies" and case == "second":
            os._exit(3)
    store.add({{"name": case, "impls": {{"good": {{}}}}}})
"""


def test_what_hangs_or_dies_is_left_out(tmp_path: Path) -> None:
    out, progress, script = tmp_path / "run.json", tmp_path / "progress", tmp_path / "child.py"
    script.write_text(CHILD.format(path=[str(BENCHMARKS), str(BENCHMARKS.parent)]))
    Store(out, HEADER).save()

    def reload() -> Store:
        return Store(out, json.loads(out.read_text()))

    command = [sys.executable, str(script), str(out), str(progress)]
    assert supervise.watch(command, reload, progress, hang=3.0, deadline=time.time() + 60) == 2
    found = {c["name"]: c["impls"] for c in reload().data["cells"]}
    assert found["first"] == {"good": {}, "hangs": {"error": "hung for 3 s"}}
    assert found["second"] == {"good": {}, "dies": {"error": "died with exit code 3"}}


def test_child_that_never_begins_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died with exit code 7 before its first case"):
        command = [sys.executable, "-c", "raise SystemExit(7)"]
        supervise.watch(
            command, lambda: pytest.fail("there is nothing to leave out"), tmp_path / "p", 30, time.time() + 60
        )


def test_time_limits_of_children(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert supervise.compile_all(sleeping, 2, seconds=0.3) == []
    failing = [sys.executable, "-c", "raise ValueError('no compiler')"]
    assert supervise.compile_all(failing, 2, seconds=30) == ["ValueError: no compiler"] * 2
    assert supervise.watch(sleeping, lambda: pytest.fail("not its fault"), tmp_path / "p", 60, time.time() + 0.3) == 0
