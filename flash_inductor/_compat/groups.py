"""Process groups by name: what an op takes, because an op's arguments are tensors, numbers and strings."""

from __future__ import annotations

from typing import Any


def by_name(name: str) -> Any:
    """The process group of this name; the same name means the same ranks on each of them."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]
