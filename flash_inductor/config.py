"""The package's settings: one frozen Config, read once from the environment here and nowhere else."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

ENV_PREFIX = "FLASH_INDUCTOR_"


KINDS = ("fwd", "dq", "dkdv", "dbias")
TILE = ("block_m", "block_n", "num_warps", "num_stages")


@dataclass(frozen=True)
class Config:
    """Every setting, each also an environment variable ``FLASH_INDUCTOR_<NAME>``; docs/configuration.md is its table.

    Attributes:
        enable: call :func:`flash_inductor.enable` when the package is imported; read at that moment only.  The variable
            ``FLASH_INDUCTOR_ENABLE=1`` also makes ``import torch`` import the package, where that is installed.
        cpu: rewrite attention in graphs on the CPU too ("on" or "off").
        lowering: "template" lowers the op to Inductor Triton templates, "extern" calls the eager kernels.
        kernel: "auto" takes the fastest CUDA kernel for each problem; "triton", "gluon", "cudnn" or "flash" that one
            wherever it takes the problem.
        kernel_options: tile configurations that replace the table's for the Triton kernels, also under max_autotune:
            ``{"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}, "dq": ..., "dkdv": ...,
            "dbias": ...}``.  block_m counts query rows and block_n key rows.  What is left out keeps the table's value.
        table: file with the user's own measurements of kernels and tiles, as ``flash-inductor tune`` writes it;
            "off" for none.
        include: rewrite only sites that match one of these patterns (as in fnmatch); none means all.  A pattern is
            held against the path ("model.layers.0.self_attn") and the class name of the module that the site is in and
            of each module around it, and against its place ("model.py:12 in forward").
        exclude: leave sites alone that match one of these patterns, whatever ``include`` says.
        max_mask_elements: largest closed mask (elements) that is evaluated to prove what it means.
        log_sites: log one line per attention site at INFO, besides the line per graph.
        check_stock_patterns: let Inductor's own attention patterns replace only what they mean, while this package is
            on.  They see what the matcher left alone; before torch 2.15 they take a softmax over any dim, and any
            permutation, for attention.
        strict: raise an error inside the matcher instead of logging it and compiling the graph as it was written, and
            an error of a Gluon kernel instead of logging it and launching Triton's.
    """

    enable: bool = field(default=False, repr=False)  # no part of cache keys: the switch itself is
    cpu: str = "on"
    lowering: str = "template"
    kernel: str = "auto"
    kernel_options: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    table: str = "~/.cache/flash_inductor/table.json"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
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
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        object.__setattr__(self, "kernel_options", _kernel_options(self.kernel_options))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The defaults, overridden by ``FLASH_INDUCTOR_*`` variables; a bad value raises ValueError naming it."""
        config, malformed = read_environment(environ)
        for name, why in malformed.items():
            raise ValueError(f"{name}: {why}")
        return config


def read_environment(environ: Mapping[str, str] = os.environ) -> tuple[Config, dict[str, str]]:
    """The settings with what is malformed left at its default, and {variable: what is wrong with it}."""
    values, malformed = {}, {}
    for f in fields(Config):
        name = ENV_PREFIX + f.name.upper()
        if name in environ:
            try:
                value = _FROM_TEXT[str(f.type)](environ[name])
                Config(**{f.name: value})
            except ValueError as error:
                malformed[name] = str(error).removeprefix(f"{f.name}: ")
            else:
                values[f.name] = value
    return Config(**values), malformed


def table_path(config: Config) -> Path | None:
    """Where ``Config.table`` is, whether or not there is a file; None if it is "off"."""
    return None if config.table == "off" else Path(os.path.expanduser(config.table))


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"{name}: expected patterns such as 'model.layers.*' or 'LlamaAttention', got {value!r}")
    return patterns


def _kernel_options(value: Any) -> dict[str, dict[str, int]]:
    """A copy in a fixed order, as the text of a Config is part of cache keys."""
    if not isinstance(value, Mapping) or not all(isinstance(tile, Mapping) for tile in value.values()):
        raise ValueError(f"kernel_options: expected {{kind: {{name: number}}}}, got {value!r}")
    for kind, tile in value.items():
        if kind not in KINDS:
            raise ValueError(f"kernel_options: expected kinds out of {KINDS}, got {kind!r}")
        for name, number in tile.items():
            if name not in TILE:
                raise ValueError(f"kernel_options[{kind!r}]: expected names out of {TILE}, got {name!r}")
            least = 16 if name.startswith("block") else 1
            power = isinstance(number, int) and number >= least and (name == "num_stages" or number.bit_count() == 1)
            if isinstance(number, bool) or not power:
                wanted = "a number from 1" if name == "num_stages" else f"a power of two from {least}"
                raise ValueError(f"kernel_options[{kind!r}][{name!r}]: expected {wanted}, got {number!r}")
    return {kind: {name: value[kind][name] for name in TILE if name in value[kind]} for kind in KINDS if kind in value}


def _bool(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(f"expected 0, 1, true or false, got {text!r}")
    return text.lower() in ("1", "true")


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected JSON, got {text!r}: {error}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


_FROM_TEXT: dict[str, Callable[[str], Any]] = {  # by the annotation of the field
    "str": str,
    "bool": _bool,
    "int": _int,
    "tuple[str, ...]": _words,
    "Mapping[str, Mapping[str, int]]": _json,
}


def _at_import() -> Config:
    """No error: ``import torch`` may have led here, and the commands are to say what is wrong.  Defaults are safe."""
    config, malformed = read_environment()
    for name, why in malformed.items():
        logging.getLogger("flash_inductor").error("%s is ignored: %s", name, why)
    return config


_current = _at_import()


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
