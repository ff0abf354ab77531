"""Most files here are about the templates; those about the choice of a kernel switch it on themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flash_inductor import config
from flash_inductor.ops import choice


@pytest.fixture(autouse=True, scope="module")
def templates_only() -> Iterator[None]:
    with config.override(kernel="triton"):
        yield


@pytest.fixture(autouse=True)
def forget_the_device() -> Iterator[None]:
    """The fake devices of different tests have the same number."""
    choice.device_limits.cache_clear()
    yield
    choice.device_limits.cache_clear()
