"""FLASH_INDUCTOR_ENABLE=1: attention is replaced in programs that know nothing of the package, which is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("flash_inductor", "flash_inductor_autoload.py", "pyproject.toml", "README.md", "LICENSE")

PROGRAM = """
import torch, torch.nn.functional as F

def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)

if __name__ == "__main__":
    found = []
    def look(graph_module, inputs):
        from torch._inductor import config
        passes = config.pre_grad_custom_pass
        for p in passes if isinstance(passes, tuple) else [passes]:
            p and p(graph_module.graph)
        found.append("flashbwd" in str(graph_module.graph))
        return graph_module
    x = torch.randn(1, 2, 8, 16)
    out = torch.compile(attend, backend=look)(x)
    torch.testing.assert_close(out, attend(x))
    print("replaced" if found == [True] else "stock")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for PYTHONPATH with the package as pip would install it, "wheel" or "editable"."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout)

    def install(kind: str) -> Path:
        target = tmp_path_factory.mktemp(kind)
        build = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
        (wheel,) = target.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(target)
        return target

    return install


@pytest.fixture(scope="module")
def wheel(installed: Callable[[str], Path]) -> Path:
    return installed("wheel")


def run(target: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process.  A folder of PYTHONPATH has no .pth files read, one of ``site`` has."""
    code = f"import site; site.addsitedir({str(target)!r})\n" + code
    (target / "program.py").write_text(code)
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_INDUCTOR_")}
    done = subprocess.run(
        [sys.executable, str(target / "program.py")],
        env={**env, "PYTHONPATH": str(target), **environ},
        cwd=target,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_no_code_at_all(wheel: Path) -> None:
    assert run(wheel, PROGRAM, FLASH_INDUCTOR_ENABLE="1").stdout == "replaced\n"


def test_an_editable_installation(installed: Callable[[str], Path]) -> None:
    code = "import sys, torch; print(sys.modules['flash_inductor'].is_enabled())"
    assert run(installed("editable"), code, FLASH_INDUCTOR_ENABLE="1").stdout == "True\n"


def test_nothing_is_imported_without_it(wheel: Path) -> None:
    code = "import sys, torch; print([m for m in sys.modules if m.split('.')[0] in ('flash_inductor', 'triton')])"
    assert run(wheel, code, FLASH_INDUCTOR_ENABLE="0").stdout == "[]\n"


def test_a_malformed_variable_is_ignored_and_said(wheel: Path) -> None:
    done = run(wheel, PROGRAM, FLASH_INDUCTOR_ENABLE="1", FLASH_INDUCTOR_CPU="maybe")
    assert done.stdout == "replaced\n"
    assert done.stderr == "FLASH_INDUCTOR_CPU is ignored: expected one of ('on', 'off'), got 'maybe'\n"


def test_import_torch_never_fails(wheel: Path) -> None:
    code = "import sys; sys.modules['flash_inductor.spec'] = None\n"
    code += "import torch; print(torch.ones(1))"
    done = run(wheel, code, FLASH_INDUCTOR_ENABLE="1")
    assert done.stdout == "tensor([1.])\n"
    assert "FLASH_INDUCTOR_ENABLE is set" in done.stderr and "flash_inductor.spec" in done.stderr


def test_workers(wheel: Path) -> None:
    """Processes that spawn processes, and import the package before torch."""
    code = """
import flash_inductor
from torch.utils.data import DataLoader, Dataset

class IsOn(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return int(flash_inductor.is_enabled())

if __name__ == "__main__":
    assert flash_inductor.is_enabled()
    print(next(iter(DataLoader(IsOn(), batch_size=2, num_workers=1, multiprocessing_context="spawn"))).tolist())
"""
    done = run(wheel, code, FLASH_INDUCTOR_ENABLE="1")
    assert done.stdout == "[1, 1]\n" and "flash_inductor" not in done.stderr
