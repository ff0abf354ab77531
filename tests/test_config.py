"""Config: defaults, environment variables, overrides, and its table in the documentation."""

import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flash_inductor.config import KINDS, TILE, Config, get_config, override, read_environment
from flash_inductor.kernels import configs

TABLE = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_environment_overrides_defaults() -> None:
    env = {
        "FLASH_INDUCTOR_CPU": "off",
        "FLASH_INDUCTOR_LOG_SITES": "1",
        "FLASH_INDUCTOR_MAX_MASK_ELEMENTS": "64",
        "FLASH_INDUCTOR_INCLUDE": "model.layers.*, Attention,",
        "FLASH_INDUCTOR_KERNEL_OPTIONS": '{"fwd": {"block_m": 64}}',
    }
    assert Config.from_env(env) == Config(
        cpu="off",
        log_sites=True,
        max_mask_elements=64,
        include=("model.layers.*", "Attention"),
        kernel_options={"fwd": {"block_m": 64}},
    )
    assert Config.from_env({}) == Config()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("CPU", "maybe"),
        ("LOG_SITES", "yes"),
        ("LOWERING", ""),
        ("MAX_MASK_ELEMENTS", "many"),
        ("KERNEL_OPTIONS", "{"),
        ("KERNEL_OPTIONS", "[]"),
    ],
)
def test_a_bad_value_is_named_and_leaves_the_default(name: str, raw: str) -> None:
    variable = f"FLASH_INDUCTOR_{name}"
    with pytest.raises(ValueError, match=f"^{variable}: expected .*, got .*{re.escape(raw)}"):
        Config.from_env({variable: raw})
    config, malformed = read_environment({variable: raw, "FLASH_INDUCTOR_STRICT": "1"})
    assert config == Config(strict=True) and list(malformed) == [variable]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"forward": {}}, "'forward'"),
        ({"fwd": {"BLOCK_M": 64}}, "'BLOCK_M'"),
        ({"fwd": {"block_m": 48}}, "power of two from 16, got 48"),
        ({"fwd": {"block_n": 8}}, "power of two from 16, got 8"),
        ({"dq": {"num_warps": 3}}, "power of two from 1, got 3"),
        ({"dq": {"num_stages": 0}}, "a number from 1, got 0"),
        ({"dq": {"num_stages": True}}, "got True"),
        ({"dkdv": {"block_m": "64"}}, "got '64'"),
        ({"dkdv": 3}, "expected"),
    ],
    ids=str,
)
def test_bad_tiles(options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Config(kernel_options=options)


def test_the_text_of_a_config_does_not_depend_on_the_order_of_its_options() -> None:
    """It is part of cache keys."""
    one = Config(kernel_options={"dq": {"num_warps": 4, "block_m": 32}, "fwd": {}})
    other = Config(kernel_options={"fwd": {}, "dq": {"block_m": 32, "num_warps": 4}})
    assert repr(one) == repr(other) and one == other and hash(one) == hash(other)


def test_options_are_copied() -> None:
    options = {"fwd": {"block_m": 64}}
    config = Config(kernel_options=options)
    options["fwd"]["block_m"] = 128
    assert config.kernel_options == {"fwd": {"block_m": 64}}


@pytest.mark.parametrize("patterns", [(3,), ("",), ""])
def test_bad_patterns(patterns: Any) -> None:
    with pytest.raises(ValueError, match="exclude: expected patterns"):
        Config(exclude=patterns)


def test_kinds_and_names_are_those_of_the_table() -> None:
    assert typing.get_args(configs.Kind) == KINDS
    assert configs.Config._fields == TILE


def test_override_ends_with_the_block() -> None:
    before = get_config()
    with override(lowering="extern") as inside:
        assert get_config() is inside and inside.lowering == "extern"
    assert get_config() == before


def test_every_setting_stands_in_the_documented_table() -> None:
    rows = [line.split("|")[1:-1] for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 5]
    assert [row[0].strip(" `") for row in rows] == [f.name for f in fields(Config)]
    assert [row[1].strip(" `") for row in rows] == [f"FLASH_INDUCTOR_{f.name.upper()}" for f in fields(Config)]
    shown = {"on": "on", "off": "off", "0": False, "1": True, "{}": {}}
    for row, f in zip(rows, fields(Config), strict=True):
        default = row[3].strip(" `")
        if f.name in ("include", "exclude"):
            assert default.startswith("none") and getattr(Config(), f.name) == ()
            continue
        value = shown.get(default, default)
        assert (int(default) if f.name == "max_mask_elements" else value) == getattr(Config(), f.name)
        choices = Config._CHOICES.get(f.name)
        if choices:
            assert re.findall(r"`(\w+)`", row[2]) == list(choices)
