"""What all tests share: GPU tests are skipped where there is no GPU, and no test leaves compiled code to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
