"""The option --results of conftest.py, in the form that CONTRIBUTING.md shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("x", [1, 2])
def test_is_one(x):
    assert x == 1
"""


def test_results_of_several_processes_in_a_file_elsewhere(tmp_path: Path) -> None:
    """The file is there before the processes start, as an earlier run leaves it."""
    project, results = tmp_path / "project", tmp_path / "elsewhere" / "results.txt"
    (project / "tests").mkdir(parents=True)
    results.parent.mkdir()
    results.write_text("earlier\n")
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, project / name)
    conftest = project / "tests" / "conftest.py"
    asked = "not torch.cuda.is_available()"
    assert asked in conftest.read_text()
    conftest.write_text(
        conftest.read_text().replace(asked, "False").replace("torch.cuda.get_device_capability()[0]", "9")
    )
    (project / "tests" / "test_it.py").write_text(TESTS)
    (shown,) = re.findall(r"`(pytest -m gpu [^`]*--results[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    command = shlex.split(shown.replace("-n 15", "-n 2").replace("results.txt", str(results)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([sys.executable, "-m", *command], cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = sorted(re.sub(r" \d+\.\d ", " ", line) for line in results.read_text().splitlines())
    assert lines == [
        "failed tests/test_it.py::test_is_one[2] assert 2 == 1",
        "passed tests/test_it.py::test_is_one[1]",
    ]
    assert re.search(r"failed \d+\.\d tests", done.stdout)  # told at once
