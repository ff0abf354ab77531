"""The callback for Lightning: on while a Trainer runs, off after it, also after an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import flash_inductor
from flash_inductor.integrations.lightning import FlashInductor


class Model(lightning.LightningModule):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.fail = fail
        self.on: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def on_train_batch_start(self, *_: Any) -> None:
        self.on.append(flash_inductor.is_enabled())
        if self.fail:
            raise RuntimeError("on purpose")

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Any, callback: FlashInductor, folder: Path) -> None:
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.randn(4, 8, 16), batch_size=2))


@pytest.mark.usefixtures("no_kernels")
def test_on_during_fit_and_a_report_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    stock, ours = Model(), Model()
    ours.load_state_dict(stock.state_dict())
    callback = FlashInductor()
    lightning.seed_everything(0, verbose=False)
    fit(torch.compile(ours), callback, tmp_path)
    assert ours.on == [True, True] and not flash_inductor.is_enabled()
    assert callback.explanation is not None and callback.explanation.replaced == len(callback.explanation.sites) == 1
    assert str(callback.explanation) in capsys.readouterr().out
    torch._dynamo.reset()
    lightning.seed_everything(0, verbose=False)
    off = FlashInductor(report=False, exclude="*")
    fit(torch.compile(stock), off, tmp_path)
    assert off.explanation is not None and off.explanation.replaced == 0
    assert "flash_inductor" not in capsys.readouterr().out
    torch.testing.assert_close(stock.state_dict(), ours.state_dict(), rtol=1e-5, atol=1e-6)


def test_off_after_an_error(tmp_path: Path) -> None:
    model = Model(fail=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, FlashInductor(), tmp_path)
    assert model.on == [True] and not flash_inductor.is_enabled()
