"""What the matcher saw: one record per attention-like site, and the text and data made of them.  Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .spec import AttentionSpec

if TYPE_CHECKING:
    import os

    from .picture import Picture


@dataclass(frozen=True)
class Site:
    """One attention-like place in a captured graph.

    ``reason`` is a sentence "cause; remedy" saying why a site was left alone and what to do; None if replaced.
    """

    node: str
    form: str  # how the user wrote it: "sdpa", "softmax chain"
    replaced: bool
    spec: AttentionSpec | None = None
    reason: str | None = None
    location: str | None = None  # "file.py:12 in forward"
    source: str | None = None  # the user's source line
    module: str | None = None  # path of the nn.Module that owns the code
    shapes: dict[str, str] = field(default_factory=dict)  # query, key, value -> "bf16[2, 8, 4096, 64]"
    kernel: str | None = None  # what it will run as
    nodes: tuple[str, ...] = ()  # names of the nodes that the op replaces

    @property
    def cause(self) -> str | None:
        """What stands in the way of a site that was left alone: the first part of ``reason``."""
        return None if self.reason is None else self.reason.partition("; ")[0]

    @property
    def remedy(self) -> str | None:
        """What to do about it: the rest of ``reason``, None if that names nothing."""
        return (self.reason or "").partition("; ")[2] or None

    def describe(self) -> str:
        """One line: 'sdpa at model.py:12 in forward: causal, as triton' or the reason it was left alone."""
        what = (self.spec.describe() if self.spec else "") if self.replaced else f"left alone, {self.reason}"
        kernel = f", as {self.kernel}" if self.replaced and self.kernel else ""
        return f"{self.form} at {self.location or self.node}: {what}{kernel}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        data = asdict(self)
        data["nodes"] = list(self.nodes)
        data["cause"], data["remedy"] = self.cause, self.remedy
        data["recognised_as"] = None if self.spec is None else self.spec.describe()
        if self.spec is not None:
            mask = self.spec.mask
            data["spec"]["mask"] = {
                k: v if v is None or isinstance(v, int) else str(v)
                for k, v in (("lower", mask.lower), ("upper", mask.upper))
            }
        return data


_lock = threading.Lock()
_listeners: list[list[Site]] = []
_compiled: list[Site] = []
_graphs = 0  # that the matcher was given to rewrite
_redirected: ContextVar[list[Site] | None] = ContextVar("flash_inductor_redirected", default=None)


def record(site: Site) -> None:
    """Called by the matcher for each site of each graph it is given, in any thread."""
    aside = _redirected.get()
    if aside is not None:
        aside.append(site)
        return
    with _lock:
        _compiled.append(site)
        for listener in _listeners:
            listener.append(site)


def count_graph() -> None:
    """Called by the pass for each graph that is compiled, with or without attention."""
    global _graphs
    with _lock:
        _graphs += 1


def compiled_graphs() -> int:
    """How many graphs have been looked at in this process to be compiled."""
    return _graphs


@contextmanager
def collect() -> Iterator[list[Site]]:
    """The sites recorded while the block runs, by any thread."""
    sites: list[Site] = []
    with _lock:
        _listeners.append(sites)
    try:
        yield sites
    finally:
        with _lock:
            _listeners[:] = [x for x in _listeners if x is not sites]


@contextmanager
def redirect() -> Iterator[list[Site]]:
    """Keep what this thread records in the block out of the process's record: nothing is compiled, or not yet."""
    sites: list[Site] = []
    token = _redirected.set(sites)
    try:
        yield sites
    finally:
        _redirected.reset(token)


def compiled_sites() -> list[Site]:
    """All sites recorded in this process so far."""
    with _lock:
        return list(_compiled)


def counters() -> dict[str, int]:
    """Numbers of sites replaced and left alone in this process so far."""
    sites = compiled_sites()
    replaced = sum(s.replaced for s in sites)
    return {"sites": len(sites), "replaced": replaced, "left_alone": len(sites) - replaced}


@dataclass(frozen=True)
class Explanation:
    """The attention sites of a model, or of all that was compiled; ``str()`` is a readable text of it.

    ``graphs`` and ``graph_breaks`` (a reason for each) are None where they are not known.  ``hints`` are sentences on
    what to know beside the sites.  ``pictures`` is what :meth:`draw` draws: one of each captured graph, if kept.
    """

    sites: tuple[Site, ...]
    graphs: int | None = None
    graph_breaks: tuple[str, ...] | None = None
    hints: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = field(default=(), repr=False, compare=False)

    @property
    def replaced(self) -> int:
        """How many sites are replaced (for :func:`explain`: would be)."""
        return sum(site.replaced for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "sites": [site.to_dict() for site in self.sites],
            "replaced": self.replaced,
            "left_alone": len(self.sites) - self.replaced,
            "graphs": self.graphs,
            "graph_breaks": None if self.graph_breaks is None else list(self.graph_breaks),
            "hints": list(self.hints),
        }

    def show(self) -> None:
        """Print a table as wide as the terminal is and in its colours; the plain text where there is no terminal."""
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)  # a box of 80 columns would cut file names and lines in pieces

    def draw(self, path: str | os.PathLike[str], around: int | None = 6) -> None:
        """Draw the captured graphs into a file, the nodes of each site in a box: green if replaced, else yellow.

        The suffix says how: ``.dot`` (Graphviz's text) needs nothing; ``.svg``, ``.png`` and ``.pdf`` need Graphviz's
        program ``dot``.  ``around``: only nodes at most so many edges away from a site; None draws all.

        Raises ValueError for another suffix, and where no graph is known (:func:`flash_inductor.report` keeps none);
        RuntimeError if ``dot`` is missing or fails.
        """
        from .picture import write

        write(self.pictures, self.sites, path, around)

    def __str__(self) -> str:
        from .report_text import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from .report_text import as_rich

        return as_rich(self)
