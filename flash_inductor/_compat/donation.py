"""Whether a compiled backward may overwrite what the forward saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def repeatable_backward() -> Iterator[None]:
    """A block in which what is compiled keeps what its backward needs, so that the backward can run again."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield
