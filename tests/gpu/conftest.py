"""Most files here are about the Triton kernels; those about the choice of a kernel switch it on themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flash_inductor import config


@pytest.fixture(autouse=True)
def triton_only() -> Iterator[None]:
    with config.override(kernel="triton", strict=True):  # strict: no kernel stands in for one that fails
        yield
