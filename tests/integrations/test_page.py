"""docs/integrations.md: the code of each section runs and prints what the page says.  Also the Trainer it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import flash_inductor
from flash_inductor.report import collect

from .models import DECODERS, batch

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.S | re.M)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("section", [name for name, part in SECTIONS.items() if BLOCK.search(part)])
def test_the_code_of_the_page(section: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCK.finditer(SECTIONS[section]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], f"docs/integrations.md, {section}", "exec"), names)
        if block[2]:
            assert printed.getvalue().rstrip() == block[2].rstrip()


@pytest.mark.usefixtures("no_kernels")
def test_trainer(tmp_path: Path) -> None:
    """Compiled with the plugin on, and with the attention implementation: the losses of the stock run."""
    rows = [{key: x[i] for key, x in batch("right").items()} for i in (0, 1, 0)]

    def train(implementation: str, **options: Any) -> list[float]:
        torch.manual_seed(0)
        config = DECODERS["mistral"]()
        config.num_hidden_layers = 1
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            disable_tqdm=True, save_strategy="no", use_cpu=True, seed=0, learning_rate=1e-2, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = train("sdpa")
    assert len(stock) == 3 and stock[2] < stock[0]
    with flash_inductor.enabled(), collect() as sites:
        assert train("sdpa", torch_compile=True) == pytest.approx(stock, abs=1e-3)
    assert sites and all(site.replaced for site in sites)
    assert {site.spec.describe() for site in sites if site.spec} == {"causal, window 4, padding, scale 0.353553"}
    assert train("flash_inductor") == pytest.approx(stock, abs=1e-3)
