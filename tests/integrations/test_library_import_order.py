"""Transformers knows the attention implementation whatever is imported first, and neither package imports the other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from flash_inductor._compat.hooks import when_imported

CODE = """
import sys
{first}
assert "transformers" not in sys.modules or {transformers_first}
import transformers
import transformers.models.llama.modeling_llama
{last}
config = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8,
                                  intermediate_size=8, attn_implementation="flash_inductor")
print(transformers.LlamaForCausalLM(config).config._attn_implementation)
"""


@pytest.mark.parametrize("transformers_first", [False, True])
def test_any_order(transformers_first: bool) -> None:
    lines = ("", "import flash_inductor") if transformers_first else ("import flash_inductor", "")
    code = CODE.format(first=lines[0], last=lines[1], transformers_first=transformers_first)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "flash_inductor\n", done.stderr


def test_in_the_middle_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when torch's import, by the library, leads to ours: the library is in sys.modules, but isn't complete."""
    (tmp_path / "half_library.py").write_text(
        "from test_hooks_calls import hook, calls\n"
        "hook('half_library', lambda: calls.append(__import__('half_library').NAME))\n"
        "import half_library_part\n"
        "assert calls == []\n"
        "NAME = 'complete'\n"
    )
    (tmp_path / "half_library_part.py").write_text("")
    (tmp_path / "half_library_next.py").write_text("")
    (tmp_path / "test_hooks_calls.py").write_text("calls = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    seen = importlib.import_module("test_hooks_calls")
    seen.hook = when_imported  # type: ignore[attr-defined]
    importlib.import_module("half_library")
    assert seen.calls == []
    importlib.import_module("half_library_next")
    assert seen.calls == ["complete"] and sys.meta_path == before
    for name in ("half_library", "half_library_part", "half_library_next", "test_hooks_calls"):
        del sys.modules[name]
