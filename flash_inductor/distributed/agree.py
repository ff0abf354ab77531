"""Whether all ranks mean the same call.  Transports don't say: rows that don't fit come as nonsense, or never."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_MOST = 4096
_agreed: set[tuple[Any, ...]] = set()


def check(group: Any, name: str, fields: dict[str, Any]) -> None:
    """Raise ValueError on every rank of a group unless they all came with the same values.

    Ranks ask each other once for each kind of call.  If only some of them come with a new kind, their messages don't
    fit the others', which is an error of the transport, at the latest after the group's timeout.
    """
    if dist.get_world_size(group) == 1:
        return
    key = (name, *fields.values())
    if key in _agreed:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, fields, group=group)
    for field, value in fields.items():
        values = [other.get(field) for other in everyone]
        if any(other != value for other in values):
            raise ValueError(f"{field}: expected the same on all ranks, got {values} on ranks 0 to {len(values) - 1}")
    if len(_agreed) >= _MOST:
        _agreed.clear()  # on all ranks at once: they have added the same
    _agreed.add(key)
