"""The pages that teach by an example: their code runs, in order, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_inductor.kernels import choices
from flash_inductor.matching import chain
from flash_inductor.ops import aten, choice, validate

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.S | re.M)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies of what the pages add to."""
    for module, name in ((chain, "STEPS"), (choices, "ROWS"), (aten, "FORWARD")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    for module in (choices, choice, validate):
        monkeypatch.setattr(module, "KERNELS", choices.KERNELS)
    monkeypatch.setattr(choice, "refusal", choice.refusal)
    yield
    choice.choose.cache_clear()
    choice.device_limits.cache_clear()  # of the GPU that isn't there


def run(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    names: dict[str, Any] = {"__name__": page}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block[1], f"docs/{page}", "exec"), names)
        assert printed.getvalue().rstrip() == (block[2] or "").rstrip(), f"docs/{page}, line {line + 1}"


def test_adding_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "matching")
    run("adding-a-pattern.md")


def test_adding_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "lowering")
    run("adding-a-kernel.md")
