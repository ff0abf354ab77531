"""Inductor's and AOTAutograd's caches, between processes: no stale code, and a rewrite on every compile."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

WORKER = """
    import json, sys, torch
    import torch.nn.functional as F
    import flash_inductor
    flash_inductor.compose(None)  # imports the passes before Inductor: they have to be installed all the same
    from torch._dynamo.utils import counters

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def explicit(q, k, v):
        return torch.ops.flashbwd.attn(q, k, v, is_causal=True)[0]

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16, requires_grad={train}) for _ in range(3))
    if {on}:
        flash_inductor.enable()
    out = torch.compile({fn})(q, k, v)
    if {train}:
        out.sum().backward()
    print(json.dumps({{
        "aot_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_miss": counters["aot_autograd"]["autograd_cache_miss"],
        "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
        "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
        "bypass": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
        "replaced": flash_inductor.report().replaced,
        "ratio": round((out / sdpa(q, k, v)).mean().item(), 4),
    }}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that nobody edits."""
    return copy_to(tmp_path / "package")


def copy_to(path: Path) -> Path:
    shutil.copytree(ROOT / "flash_inductor", path / "flash_inductor", ignore=shutil.ignore_patterns("__pycache__"))
    return path


@pytest.fixture
def worker(run_python, package: Path):
    def run(fn: str = "sdpa", *, on: bool = True, train: bool = True, path: Path | None = None) -> dict[str, Any]:
        path = path or package
        return json.loads(run_python(WORKER.format(fn=fn, on=on, train=train), path=path).splitlines()[-1])

    return run


def test_a_second_process_hits_the_caches_and_still_runs_the_pass(worker) -> None:
    first = worker()
    assert first["aot_miss"] == 1 and first["aot_hit"] == 0 and first["replaced"] == 1
    second = worker()
    assert second["aot_hit"] == 1 and second["aot_miss"] == second["fx_miss"] == 0
    assert second["replaced"] == 1  # it ran, though the code came from the cache
    off = worker(on=False)
    assert off["aot_hit"] == off["fx_hit"] == off["replaced"] == 0 and off["aot_miss"] == 1
    assert all(r["bypass"] == 0 and r["ratio"] == 1 for r in (first, second, off))


def test_pitfall_1_changed_sources_are_not_served_stale_code(worker, package: Path, tmp_path: Path) -> None:
    """No cache key of Inductor's contains a custom op's lowering: the key pass has to, also for explicit op calls."""
    assert worker("explicit", on=False, train=False)["fx_miss"] == 1
    changed = tmp_path / "changed"
    shutil.copytree(package, changed)
    with open(changed / "flash_inductor/lowering/__init__.py", "a") as source:
        source.write(DOUBLING_LOWERING)
    result = worker("explicit", on=False, train=False, path=changed)
    assert (result["fx_hit"], result["aot_hit"], result["ratio"]) == (0, 0, 2)


DOUBLING_LOWERING = """

import torch
from torch._inductor import lowering as _L

_double = _L.fallback_handler(torch.ops.aten.mul.Scalar, add_to_fallback_set=False)
_call = _L.fallback_handler(torch.ops.flashbwd.attn.default, add_to_fallback_set=False)


@_L.register_lowering(torch.ops.flashbwd.attn.default, type_promotion_kind=None)
def _doubled(*args, **kwargs):
    out, lse = _call(*args, **kwargs)
    return _double(out, 2.0), lse
"""
