"""docs/distributed.md: its projection is what its snippet prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_the_projection_is_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOC.read_text()
    (table,) = re.findall(r"^```text\n(ranks .*?)^```", text, flags=re.S | re.M)
    (snippet,) = re.findall(r"^```python\n(from flash_inductor.*?)^```", text, flags=re.S | re.M)
    exec(compile(snippet, str(DOC), "exec"), {})
    assert capsys.readouterr().out == table
