"""What a case is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Build = Callable[[str, str], Any]


@dataclass(frozen=True)
class Case:
    """A function, its inputs and the right answer; see :mod:`cases.judge` for what ``build(device, dtype)`` gives.

    Attributes:
        links: the public reports it is made of.
        symptom: what goes wrong where the fault is.
        want: what is right.
        fuse: "yes" if a fused kernel can give the right value, "no" if the graph only looks like attention (it may be
            replaced if what differs is kept), "either" without an opinion.
        dtypes: names, keys of ``cases.inputs.DTYPES``.
        heavy: needs gigabytes.
        stock: what torch 2.13 on the CPU gets wrong without the plugin, by mode ("eager", "compile").
    """

    name: str
    build: Build
    links: Sequence[str]
    kind: str
    symptom: str
    want: str
    fuse: str
    dtypes: Sequence[str]
    heavy: bool
    stock: dict[str, str]


class Book(list[Case]):
    """A list of cases with a decorator that adds to it."""

    def case(
        self,
        name: str,
        *,
        links: Sequence[str],
        kind: str,
        symptom: str,
        want: str,
        fuse: str = "either",
        dtypes: Sequence[str] = ("fp32",),
        heavy: bool = False,
        stock: dict[str, str] | None = None,
    ) -> Callable[[Build], Build]:
        def add(build: Build) -> Build:
            self.append(Case(name, build, links, kind, symptom, want, fuse, dtypes, heavy, stock or {}))
            return build

        return add
