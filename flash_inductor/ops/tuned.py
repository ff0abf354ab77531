"""The user's own table of kernels and tiles, as ``flash-inductor tune`` writes it; docs/command-line.md says its form.

It is read once in a process, at its first use, and only says what is faster: kernels by name, and tiles that stand in
the package's own tables.  A file that can't be understood is not used, with a warning (an error if ``Config.strict``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, get_config, table_path
from ..kernels import choices
from ..kernels.choices import Row
from ..kernels.configs import KINDS, known
from ..kernels.configs import Config as Tile

FORMAT = 1
BUCKETS = (64, 128, 256)
log = logging.getLogger("flash_inductor")


@dataclass(frozen=True, eq=False)  # compared by identity: a key of caches
class Table:
    """Rows of kernels by compute capability (major * 10 + minor); tiles by capability, kind and padded head dim.

    ``digest`` of the file, "" if there is none, is part of Inductor's cache keys.
    """

    digest: str = ""
    kernels: Mapping[int, tuple[Row, ...]] = field(default_factory=dict)
    tiles: Mapping[tuple[int, str, int], tuple[Tile, ...]] = field(default_factory=dict)

    def order(self, capability: int, *problem: Any) -> tuple[str, ...]:
        """Kernels, fastest first, for a problem as ``kernels.choices.order`` takes it; () where nothing is known."""
        return choices.first_row(self.kernels.get(capability, ()), *problem)


NONE = Table()
_read: dict[str, Table] = {}  # by Config.table: an eager call asks for it, so there is no time for paths


def current() -> Table:
    """The table that is in force, by ``Config.table``."""
    name = get_config().table
    found = _read.get(name)
    if found is None:
        path = table_path(get_config())
        found = _read[name] = NONE if path is None else _load(path)
    return found


def forget() -> None:
    """Read files again at their next use."""
    _read.clear()


def _load(path: Path) -> Table:
    try:
        text = path.read_text()
    except FileNotFoundError:
        if get_config().table != Config.table:  # asked for by name, not just the place where one would be
            log.warning("there is no table of kernels at %s; flash-inductor tune makes one", path)
        return NONE
    except (OSError, UnicodeDecodeError) as error:
        return _unusable(path, error)
    try:
        return parse(text)
    except ValueError as error:
        return _unusable(path, error)


def _unusable(path: Path, error: Exception) -> Table:
    words = f"the table of kernels {path} is not used: {error}; make it again with flash-inductor tune, or delete it"
    if get_config().strict:
        raise ValueError(words) from error
    log.warning(words)
    return NONE


def parse(text: str) -> Table:
    """The table of a file's text; ValueError names the place and what is expected there."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected an object with format {FORMAT}, got {str(data)[:60]}")
    kernels: dict[int, tuple[Row, ...]] = {}
    tiles: dict[tuple[int, str, int], tuple[Tile, ...]] = {}
    gpus = _is(data.get("gpus"), dict, "gpus")
    for name, gpu in gpus.items():
        if not name.isdecimal():
            raise ValueError(f"gpus: expected compute capabilities such as '90', got {name!r}")
        capability, at = int(name), f"gpus[{name!r}]"
        rows = _is(_is(gpu, dict, at).get("kernels", []), list, f"{at}['kernels']")
        kernels[capability] = tuple(_row(row, f"{at}['kernels'][{i}]") for i, row in enumerate(rows))
        entries = _is(gpu.get("tiles", []), list, f"{at}['tiles']")
        for i, entry in enumerate(entries):
            place = f"{at}['tiles'][{i}]"
            kind, bucket = _one_of(entry, "kind", KINDS, place), _one_of(entry, "head_dim", BUCKETS, place)
            tiles[capability, kind, bucket] = _configs(entry.get("tiles"), kind, bucket, place)
    return Table(hashlib.sha256(text.encode()).hexdigest(), kernels, tiles)


def _row(row: Any, at: str) -> Row:
    names = _is(_is(row, dict, at).get("kernels"), list, f"{at}['kernels']")
    if not names or any(name not in choices.KERNELS for name in names):
        raise ValueError(f"{at}['kernels']: expected names out of {choices.KERNELS}, got {names!r}")
    ends = row.get("lengths")
    if not (isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)):
        raise ValueError(f"{at}['lengths']: expected the first and the last length, got {ends!r}")
    return Row(
        _one_of(row, "kind", ("fwd", "bwd"), at),
        _one_of(row, "head_dim", BUCKETS, at),
        _one_of(row, "band", ("full", "causal", "window"), at),
        (ends[0], ends[1]),
        tuple(names),
        _one_of(row, "softcap", (False, True), at),
    )


def _configs(value: Any, kind: str, bucket: int, at: str) -> tuple[Tile, ...]:
    found = []
    for tile in _is(value, list, f"{at}['tiles']"):
        if not (isinstance(tile, list) and len(tile) == 4 and all(type(n) is int for n in tile)):
            raise ValueError(f"{at}['tiles']: expected [block_m, block_n, num_warps, num_stages], got {tile!r}")
        if Tile(*tile) not in known(kind, bucket):  # type: ignore[arg-type]
            raise ValueError(f"{at}['tiles']: {tile} is none of the tiles that the package knows for {kind}")
        found.append(Tile(*tile))
    return tuple(found)


def _is(value: Any, kind: type, at: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{at}: expected {'an object' if kind is dict else 'a list'}, got {str(value)[:60]}")
    return value


def _one_of(entry: Any, name: str, allowed: tuple[Any, ...], at: str) -> Any:
    value = _is(entry, dict, at).get(name)
    if not any(value == x and type(value) is type(x) for x in allowed):
        raise ValueError(f"{at}[{name!r}]: expected one of {allowed}, got {value!r}")
    return value


def write(path: Path, capability: int, gpu: dict[str, Any]) -> None:
    """Put what was measured for a GPU into a file; other GPUs' entries, if the file can be read, stay."""
    gpus: dict[str, Any] = {}
    if path.exists():
        try:
            parse(path.read_text())
            gpus = json.loads(path.read_text())["gpus"]
        except ValueError as error:
            log.warning("%s is written anew: %s", path, error)
    text = json.dumps({"format": FORMAT, "gpus": {**gpus, str(capability): gpu}}, indent=1) + "\n"
    parse(text)  # what this package writes, it must read
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)  # whoever reads at this moment sees all of the old file, or of the new one
