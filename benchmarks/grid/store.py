"""The JSON file of a run: written after every cell, read again to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_inductor.bench.case import Case


class Store:
    """``data`` is what the file holds: the run's header, ``cells``, and ``broken``: [case, implementation, why]."""

    def __init__(self, path: Path | None, data: dict[str, Any]) -> None:
        self.path, self.data = path, data
        data.setdefault("cells", [])
        data.setdefault("broken", [])

    @classmethod
    def open(cls, path: Path | None, header: dict[str, Any], resume: bool) -> Store:
        """A new file, or the one at ``path`` if it is resumed; ValueError if that is of another device or versions."""
        if not resume or path is None or not path.exists():
            return cls(path, dict(header))
        data = json.loads(path.read_text())
        for key in ("device", "versions"):
            if data[key] != header[key]:
                raise ValueError(f"{path}: expected {key} {header[key]} to resume, got {data[key]}")
        return cls(path, data)

    def save(self) -> None:
        if self.path is None:
            return
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)  # a reader, or a kill, never meets half a file

    def has(self, case: Case, names: Collection[str]) -> bool:
        """Whether the cell is there with all these implementations."""
        return any(c["name"] == str(case) and set(names) <= set(c["impls"]) for c in self.data["cells"])

    def add(self, cell: dict[str, Any]) -> None:
        """Add a cell, in place of one of the same name; implementations that broke on it get their reason."""
        for case, impl, why in self.data["broken"]:
            if case == cell["name"] and impl not in cell["impls"]:
                cell["impls"][impl] = {"error": why}
        self.data["cells"] = [c for c in self.data["cells"] if c["name"] != cell["name"]] + [cell]
        self.save()

    def add_broken(self, case: str, impl: str, why: str) -> None:
        self.data["broken"].append([case, impl, why])
        self.save()

    @property
    def broken(self) -> set[tuple[str, str]]:
        return {(case, impl) for case, impl, _ in self.data["broken"]}
