"""What the demo trains, for how long, and on which text.  Plain data: it goes to the child processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .model import ModelConfig


@dataclass(frozen=True)
class Settings:
    """One demo run; the defaults are for two CPU cores."""

    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 1
    length: int = 1024
    steps: int = 30
    learning_rate: float = 2e-3
    seed: int = 0
    text: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)

    @classmethod
    def for_device(cls, device: str, steps: int | None = None, text: str | None = None) -> Settings:
        """The run that suits a device: minutes on a laptop's CPU, a larger model in bf16 on a GPU."""
        if device == "cpu":
            return cls(steps=steps or cls.steps, text=text)
        model = ModelConfig(dim=768, layers=8, heads=12, kv_heads=4, head_dim=64, hidden=3072, window=512)
        return cls(
            device=device,
            dtype="bfloat16",
            batch=1,
            length=4096,
            steps=steps or 60,
            learning_rate=5e-4,
            text=text,
            model=model,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Settings:
        return cls(**{**data, "model": ModelConfig(**data["model"])})


def load_text(path: str | None) -> bytes:
    """The bytes of a file, or of the language reference that every Python ships (about 460 kB of English prose)."""
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()
