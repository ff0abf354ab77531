"""What the commands raise when they can't run."""

from __future__ import annotations


class UsageError(ValueError):
    """What the user gave can't be used; the message says what was expected, and is all that is printed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a GPU."""
    import torch

    words = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in words)
    )
