"""The CPU tests on every supported torch, each with its own triton, in an environment of its own.

    python tools/versions.py                          all of them, one after another (gigabytes, and an hour)
    python tools/versions.py --only 2.11,newest       some of them
    python tools/versions.py --only 2.12 --keep ~/envs --tests tests/lowering tests/matching/test_buffers.py

"newest" is the newest torch that pip finds.  With --keep the environments stay in that folder, and are used again; only
what the pins or pyproject.toml have changed since is installed.  Everything else is installed as constraints.txt says.
The last lines are a table; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A torch from the default index requires its triton itself; builds for CPUs only leave it open.
TORCH = {"2.11": "2.11.0", "2.12": "2.12.1", "2.13": "2.13.0", "2.14": "2.14.1"}
TRITON = {"2.11.0": "3.6.0", "2.12.1": "3.7.1", "2.13.0": "3.7.1", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
NEWEST = "newest"
SUITES = {
    # matching, ops, code generated for a GPU that isn't there, Triton's interpreter, and what is private to a version
    "all": ["tests/matching", "tests/ops", "tests/lowering", "tests/kernels", "tests/integration", "tests/ecosystem"],
    # What leans most on what versions differ in, a file or more of each kind.
    "short": [
        "tests/integration/test_switch.py",
        "tests/lowering/test_generated_code.py",
        "tests/lowering/test_fallback.py",
        "tests/matching/test_buffers.py",
        "tests/ops/test_transforms.py",
        "tests/kernels/test_interpreter.py",
        "tests/ecosystem/test_processes.py",
        "tests/ecosystem/test_functorch.py",
        "tests/ecosystem/test_checkpoint.py",
        "tests/ecosystem/test_faults.py",
    ],
}


@dataclass
class Row:
    """What became of one version."""

    torch: str
    triton: str = "-"
    result: str = "not installed"
    failed: bool = True
    install_s: float = 0.0
    tests_s: float = 0.0
    names: list[str] = field(default_factory=list)  # of tests that failed


def newest(python: str) -> str:
    """The version of the newest torch that pip finds; RuntimeError if it finds none."""
    done = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^torch \(([^)]+)\)", done.stdout, re.M)
    if found is None:
        raise RuntimeError(f"pip found no torch: {done.stderr.strip()[-500:]}")
    return found[1].partition("+")[0]


def constraints(torch: str) -> list[str]:
    """The lines of constraints.txt, with this torch and its triton; torch says itself which setuptools it takes."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    kept = [line for line in lines if re.split(r"[=<>~!]", line)[0].strip() not in ("torch", "triton", "setuptools")]
    return [*kept, f"torch=={torch}", *([f"triton=={TRITON[torch]}"] if torch in TRITON else [])]


def wanted(torch: str) -> str:
    """What an environment is made from; another text, and pip has to run again."""
    project = re.findall(r"^(?:dependencies|test|models) = .*", (ROOT / "pyproject.toml").read_text(), re.M)
    return "\n".join([*constraints(torch), *project])


def install(folder: Path, torch: str) -> str:
    """Make the environment unless it is there, and return its Python; CalledProcessError if pip fails."""
    python = str(folder / "bin" / "python")
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == wanted(torch):
        return python
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=folder.exists())
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(constraints(torch)) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--progress-bar", "off", "-c", str(pins)]
    subprocess.run([*pip, "triton", "-e", f"{ROOT}[test]"], check=True)
    ready.write_text(wanted(torch))
    return python


def versions_in(python: str) -> tuple[str, str]:
    """torch and triton of an environment."""
    command = "import torch, triton; print(torch.__version__, triton.__version__)"
    out = subprocess.run([python, "-c", command], capture_output=True, text=True, check=True).stdout
    torch, triton = out.split()
    return torch, triton


def run_tests(python: str, tests: Sequence[str], workers: int, row: Row) -> None:
    """Run them, and fill in the row."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", f"--junitxml={report}"]
        command += ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
        environment.pop("PYTEST_ADDOPTS", None)  # meant for the run that this one may be a part of
        code = subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False).returncode
        row.tests_s = time.monotonic() - begin
        if not report.exists():
            row.result = f"pytest ended with exit code {code}"
            return
        summarise(report, code, row)


def summarise(report: Path, code: int, row: Row) -> None:
    """What pytest's report says, into the row."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    row.result = f"{total - failures - errors - skipped} passed, {failures + errors} failed, {skipped} skipped"
    row.failed = code != 0 or total == skipped
    row.names = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def check(torch: str, folder: Path, tests: Sequence[str], workers: int) -> Row:
    """Install one version and run the tests with it."""
    row = Row(torch)
    begin = time.monotonic()
    try:
        python = install(folder, torch)
        row.torch, row.triton = versions_in(python)
    except subprocess.CalledProcessError as error:
        row.result = f"not installed: exit code {error.returncode}"
        return row
    finally:
        row.install_s = time.monotonic() - begin
    print(f"# torch {row.torch}, triton {row.triton}", flush=True)
    run_tests(python, tests, workers, row)
    return row


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'torch':16} {'triton':8} {'install':>8} {'tests':>8}  result"]
    for row in rows:
        lines.append(f"{row.torch:16} {row.triton:8} {row.install_s:7.0f}s {row.tests_s:7.0f}s  {row.result}")
        lines += [f"    {name}" for name in row.names]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default=",".join((*TORCH, NEWEST)), help="versions, comma-separated (default: %(default)s)")
    add("--keep", type=Path, metavar="FOLDER", help="keep the environments there, and use those that are there")
    add("--tests", nargs="+", default=["all"], help=f"{', '.join(SUITES)}, or what pytest takes (default: all)")
    add("--workers", type=int, default=1, help="processes that run tests (default: %(default)s)")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := [v for v in args.only if v not in (*TORCH, NEWEST) and not re.fullmatch(r"\d+\.\d+\.\d+", v)]:
        parser.error(
            f"--only: expected some of {', '.join((*TORCH, NEWEST))} or full versions, got {', '.join(unknown)}"
        )
    args.tests = [path for name in args.tests for path in SUITES.get(name, [name])]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    for name in args.only:
        version = newest(sys.executable) if name == NEWEST else TORCH.get(name, name)
        with tempfile.TemporaryDirectory() as folder:
            place = args.keep or Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            rows.append(check(version, place / f"torch-{version}", args.tests, args.workers))
    print(table(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
