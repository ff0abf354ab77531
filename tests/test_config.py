"""Config: defaults, environment variables, overrides."""

import pytest

from flash_inductor.config import Config, get_config, override


def test_environment_overrides_defaults() -> None:
    env = {"FLASH_INDUCTOR_CPU": "off", "FLASH_INDUCTOR_LOG_SITES": "1", "FLASH_INDUCTOR_MAX_MASK_ELEMENTS": "64"}
    assert Config.from_env(env) == Config(cpu="off", log_sites=True, max_mask_elements=64)
    assert Config.from_env({}) == Config()


@pytest.mark.parametrize("name,raw", [("CPU", "maybe"), ("LOG_SITES", "yes"), ("LOWERING", "")])
def test_a_bad_value_is_named(name: str, raw: str) -> None:
    with pytest.raises(ValueError, match=name.lower() if name != "LOG_SITES" else name):
        Config.from_env({f"FLASH_INDUCTOR_{name}": raw})


def test_override_ends_with_the_block() -> None:
    before = get_config()
    with override(lowering="extern") as inside:
        assert get_config() is inside and inside.lowering == "extern"
    assert get_config() == before
