"""benchmarks/distributed.py at toy sizes, and what it reads from a trace."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distributed.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_context_parallel", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--ranks", "2", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, timeout=300)
    cells = json.loads(out.read_text())["cells"]
    ours = [cell for cell in cells if cell["impl"] in ("ring", "gather")]
    assert len(ours) == 8 and all(cell["both_ms"] > 0 for cell in ours)
    checked = [cell for cell in ours if cell["length"] == 128]
    assert all(max(cell["differences"].values()) < 1e-5 for cell in checked)
    others = [cell for cell in cells if cell["impl"].startswith("torch")]
    assert others and all(cell["error"] for cell in others)  # torch's ring has no kernel on the CPU
    text = out.with_suffix(".txt").read_text()
    assert all(cell["impl"] in text for cell in cells)


def test_hidden_is_the_part_of_a_transfer_during_which_something_else_runs(script: ModuleType) -> None:
    def kernel(name: str, start: float, stop: float) -> dict[str, object]:
        return {"name": name, "ts": start, "dur": stop - start}

    transfer = kernel("ncclDevKernel_SendRecv", 10, 20)
    assert script.hidden_part([kernel("attention", 0, 30)]) is None
    assert script.hidden_part([transfer]) == 0
    assert script.hidden_part([transfer, kernel("attention", 0, 30)]) == 1
    assert script.hidden_part([transfer, kernel("a", 8, 13), kernel("b", 11, 14), kernel("c", 18, 40)]) == 0.6
