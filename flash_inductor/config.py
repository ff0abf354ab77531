"""The package's settings: one frozen Config, read once from the environment here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

ENV_PREFIX = "FLASH_INDUCTOR_"


@dataclass(frozen=True)
class Config:
    """Every setting, each also an environment variable ``FLASH_INDUCTOR_<NAME>``.

    Attributes:
        cpu: rewrite attention in graphs on the CPU too ("on" or "off").
        lowering: "template" lowers the op to Inductor Triton templates, "extern" calls the eager kernels.
        kernel: "auto" takes the fastest CUDA kernel for each problem; "triton", "gluon", "cudnn" or "flash" that one
            wherever it takes the problem.
        max_mask_elements: largest closed mask (elements) that is evaluated to prove what it means.
        log_sites: log one line per attention site at INFO, besides the line per graph.
        check_stock_patterns: let Inductor's own attention patterns replace only what they mean, while this package is
            on.  They see what the matcher left alone; before torch 2.15 they take a softmax over any dim, and any
            permutation, for attention.
        strict: raise an error inside the matcher instead of logging it and compiling the graph as it was written, and
            an error of a Gluon kernel instead of logging it and launching Triton's.
    """

    cpu: str = "on"
    lowering: str = "template"
    kernel: str = "auto"
    max_mask_elements: int = 1 << 28
    log_sites: bool = False
    check_stock_patterns: bool = True
    strict: bool = False

    _CHOICES = {  # noqa: RUF012 - no annotation: not a field
        "cpu": ("on", "off"),
        "lowering": ("template", "extern"),
        "kernel": ("auto", "triton", "gluon", "cudnn", "flash"),
    }

    def __post_init__(self) -> None:
        for name, allowed in self._CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The defaults, overridden by ``FLASH_INDUCTOR_*`` variables; a bad value raises ValueError naming it."""
        values: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for f in fields(cls):
            raw = environ.get(ENV_PREFIX + f.name.upper())
            if raw is None:
                continue
            if hints[f.name] is bool:
                if raw.lower() not in ("0", "1", "true", "false"):
                    raise ValueError(f"{ENV_PREFIX}{f.name.upper()}: expected 0, 1, true or false, got {raw!r}")
                values[f.name] = raw.lower() in ("1", "true")
            elif hints[f.name] is int:
                values[f.name] = int(raw)
            else:
                values[f.name] = raw
        return cls(**values)


_current = Config.from_env()


def get_config() -> Config:
    """The settings in force, the same in every thread."""
    return _current


def set_config(config: Config) -> None:
    """Replace the settings, in every thread.  Compiled functions keep what they were compiled with."""
    global _current
    _current = config


@contextmanager
def override(**changes: Any) -> Iterator[Config]:
    """Change settings inside a with block: ``with override(lowering="extern"): ...``"""
    before = _current
    set_config(replace(before, **changes))
    try:
        yield _current
    finally:
        set_config(before)
