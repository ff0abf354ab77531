"""One training run in its own process, so that its peak memory is its own; JSON lines on stdout.

python -m flash_inductor.demo.worker stock|plugin SETTINGS_JSON
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..matching.install import enabled
from ..report import compiled_sites
from .model import LanguageModel
from .settings import Settings, load_text


def emit(event: str, **data: Any) -> None:
    print(json.dumps({"event": event, **data}), flush=True)


def batches(settings: Settings, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` random pieces of the text as (tokens, next tokens), int64 [batch, length] each; a token is a byte."""
    text = torch.frombuffer(bytearray(load_text(settings.text)), dtype=torch.uint8)
    if len(text) <= settings.length:
        raise ValueError(f"text: expected more than {settings.length} bytes, got {len(text)}")
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(count):
        starts = torch.randint(len(text) - settings.length, (settings.batch,), generator=generator).tolist()
        piece = torch.stack([text[s : s + settings.length + 1] for s in starts]).long().to(settings.device)
        yield piece[:, :-1].contiguous(), piece[:, 1:].contiguous()


def make_model(settings: Settings) -> LanguageModel:
    torch.manual_seed(settings.seed)
    return LanguageModel(settings.model).to(device=settings.device, dtype=getattr(torch, settings.dtype))


class MemoryMeter:
    """Peak memory of the steps after the compilation, in bytes: CUDA's allocator, or this process's resident set."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"
        self.idle = 0

    def start(self) -> None:
        """Forget the peak that compiling needed."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.idle = torch.cuda.memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the resident set
            self.idle = self._status("VmRSS")
        except (OSError, LookupError):
            self.idle = 0  # not Linux, or not allowed: the peak then includes the compilation

    def peak(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        if self.idle:
            return self._status("VmHWM")
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(name)


def train(
    settings: Settings, model: LanguageModel, compiled: Callable[..., Any], phase: str, meter: MemoryMeter | None = None
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    for step, (tokens, targets) in enumerate(batches(settings, settings.steps)):
        if step == 1 and meter is not None:
            meter.start()  # the first step compiles
        begin = time.perf_counter()
        loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the device
        emit("step", phase=phase, step=step, loss=value, seconds=time.perf_counter() - begin)


def run(variant: str, settings: Settings) -> None:
    model, meter = make_model(settings), MemoryMeter(settings.device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    with enabled() if variant == "plugin" else nullcontext():
        compiled = torch.compile(model)
        train(settings, model, compiled, "train", meter)
    emit(
        "done",
        peak_bytes=meter.peak(),
        idle_bytes=meter.idle,
        sites=[site.to_dict() for site in compiled_sites()],
        torch=torch.__version__,
        parameters=sum(p.numel() for p in model.parameters()),
        device=torch.cuda.get_device_name() if meter.cuda else f"cpu, {torch.get_num_threads()} threads",
    )
    if variant == "stock":  # the yardstick: the same arithmetic with other roundings
        model.load_state_dict(initial)
        train(settings, model, model, "eager")


def main() -> None:
    variant, settings = sys.argv[1:]
    run(variant, Settings.from_dict(json.loads(settings)))


if __name__ == "__main__":
    main()
