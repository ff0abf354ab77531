"""The distributions, built from the tree and used where the wheel was installed, and the pinned environment."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flash_inductor

ROOT = Path(__file__).parent.parent
PACKAGE = Path(flash_inductor.__file__).parent
CODE = """
import importlib.metadata
import torch
import flash_inductor

assert flash_inductor.__file__.startswith({target!r}), flash_inductor.__file__
assert importlib.metadata.version("flash-inductor") == flash_inductor.__version__ == {version!r}
q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
out = flash_inductor.attention(q, k, v, is_causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected)
with flash_inductor.enabled():
    compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention)
    assert flash_inductor.explain(compiled, q, k, v).replaced == 1
import flash_inductor.lowering
assert flash_inductor.lowering.registered
"""


def run(*command: str, cwd: Path, **environ: str) -> str:
    environment = {**os.environ, **environ}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


def test_sdist_holds_tests_and_docs(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"tests/test_packaging.py", "tests/gpu/conftest.py", "docs/patterns.md", "examples/vit.py", ".ci/run"}
    wanted |= {"mkdocs.yml", "constraints.txt", "CHANGELOG.md", "LICENSE", "benchmarks/results/plots/anchors.png"}
    assert wanted - names == set()
    assert [name for name in names if name.endswith(".pyc")] == []


def test_wheel_holds_the_package(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(path).namelist())
    files = {p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    wanted = {p.relative_to(PACKAGE.parent).as_posix() for p in files} | {"flash_inductor_autoload.py"}
    assert wanted - names == set()  # py.typed and the templates among them
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {
        "flash_inductor",
        "flash_inductor_autoload.py",
    }


def test_installed_wheel_works(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    target = tmp_path / "target"
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=dist
    )
    code = CODE.format(target=str(target), version=flash_inductor.__version__)
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    assert "demo" in run(sys.executable, "-m", "flash_inductor", "--help", cwd=tmp_path, PYTHONPATH=str(target))


def requirements(name: str, wheel: Path) -> list[str]:
    """The requirements of a package that is installed here, none if it isn't; of ours what the wheel says."""
    if name == "flash-inductor":
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            message = email.message_from_bytes(archive.read(metadata))
        return message.get_all("Requires-Dist") or []
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def test_constraints_pin_all_that_ci_installs(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if re.match("[^#]+==[^=]+$", line)}
    assert len(pins) == len([line for line in lines if line and not line.startswith("#")])
    pending, seen = [Requirement("flash-inductor[dev]")], set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            further = map(Requirement, requirements(name, wheel))
            pending += [r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})]
    names = {name for name, _ in seen}
    assert {"torch", "sympy", "mkdocs", "ruff", "tokenizers"} < names  # the walk works
    # CUDA libraries belong to one build of torch, which names them exactly.
    assert {name for name in names - pins if not re.match("nvidia-|cuda-", name)} == {"flash-inductor"}
