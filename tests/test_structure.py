"""Rules about the code and the documents themselves: layers, private names, sizes, and docs that name what exists."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from flash_inductor.config import ENV_PREFIX, Config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flash_inductor"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])

# Layer -> what it may import besides itself.  Modules at the top of the package that aren't listed are the user API.
BASE = {"spec", "config", "support", "report", "report_text", "picture"}
LAYERS: dict[str, set[str]] = {
    "spec": set(),
    "config": set(),
    "support": {"spec"},
    "report": {"spec", "report_text", "picture"},
    "picture": {"report"},
    "report_text": {"report"},
    "_compat": set(),
    "reference": {"spec"},
    "bench": {*BASE, "ops", "kernels"},
    "kernels": BASE,
    "ops": {*BASE, "_compat", "kernels"},
    "lowering": {*BASE, "_compat", "ops", "kernels"},
    "matching": {*BASE, "_compat", "ops"},
    "distributed": {*BASE, "_compat", "ops", "functional"},
}
# The pass that carries the cache key runs right before Inductor lowers a graph: the moment to load the lowerings.
EXCEPTIONS = {("matching/fusion_pass.py", "lowering")}


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    """The layers of this package that a file imports, anywhere in it."""
    package = ["flash_inductor", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "flash_inductor" and len(name) > 1}
    return found


def test_import_finder_sees_every_form(tmp_path: Path) -> None:
    # The layer test below would pass for ever if the finder missed a form.
    assert imported_layers(PACKAGE / "demo" / "worker.py") >= {"matching", "report", "demo"}
    assert "spec" in imported_layers(PACKAGE / "report.py")
    assert "ops" in imported_layers(PACKAGE / "__init__.py")


@pytest.mark.parametrize("name", LAYERS)
def test_imports_go_one_way(name: str) -> None:
    wrong = []
    for path in SOURCES:
        if layer(path) != name:
            continue
        relative = path.relative_to(PACKAGE).as_posix()
        for other in imported_layers(path) - LAYERS[name] - {name}:
            if (relative, other) not in EXCEPTIONS:
                wrong.append(f"{relative} imports {other}")
    assert not wrong


def test_private_torch_names_only_in_compat() -> None:
    wrong = []
    for path in SOURCES:
        if layer(path) == "_compat":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            if any(re.match(r"torch\._(inductor|dynamo)\b", name) for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {names[0]}")
    assert not wrong


def test_demo_model_knows_only_torch() -> None:
    # The demo shows a user's model; it must not be written for the plugin.
    path = PACKAGE / "demo" / "model.py"
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports from the package"
            roots.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
    assert roots == {"__future__", "dataclasses", "math", "torch"}


def test_no_file_above_400_lines() -> None:
    files = [p for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks") for p in folder.rglob("*")]
    long = {
        p.relative_to(ROOT).as_posix(): count
        for p in files
        if p.suffix in (".py", ".jinja") and (count := len(p.read_text().splitlines())) > 400
    }
    assert not long


def inline_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)))


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_docs_name_only_what_exists(path: Path) -> None:
    text = path.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and not (path.parent / target).exists():
            missing.append(f"link {target}")
    for code in inline_code(text):
        if re.fullmatch(r"(flash_inductor|tests|benchmarks|docs|\.ci)/[\w./-]*", code) and not (ROOT / code).exists():
            missing.append(f"file {code}")
        if (name := re.match(r"flash_inductor((?:\.\w+)+)", code)) and not resolves(name[1][1:].split(".")):
            missing.append(f"name {code}")
    settings = {ENV_PREFIX + f.name.upper() for f in fields(Config)}
    missing += [f"variable {v}" for v in set(re.findall(rf"\b{ENV_PREFIX}\w+", text)) - settings]
    assert not missing


def resolves(names: list[str]) -> bool:
    """Whether flash_inductor.a.b.c exists, as a module or as an attribute."""
    found = importlib.import_module("flash_inductor")
    for i, name in enumerate(names):
        try:
            found = importlib.import_module("flash_inductor." + ".".join(names[: i + 1]))
        except ImportError:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
    return True


def test_name_checker_can_fail() -> None:
    assert resolves(["enable"]) and resolves(["demo", "settings", "Settings", "for_device"])
    assert not resolves(["enables"]) and not resolves(["demo", "nothing"])
