"""Pictures of captured graphs with their attention sites, as text for Graphviz or drawn by its program ``dot``.

Torch-free but for :func:`take`, which only reads names and shapes: a picture keeps no graph, module or tensor alive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Site

TEXT, DRAWN = (".dot", ".gv"), (".svg", ".png", ".pdf")
MISSING = (
    "drawing {suffix} needs Graphviz's program dot, which is not on PATH; install Graphviz (apt install graphviz, brew "
    "install graphviz or conda install graphviz), or write .dot and draw it elsewhere"
)


@dataclass(frozen=True)
class Picture:
    """Nodes {name: label}, edges (from, to), and which site (a number from 1) each node of a site belongs to."""

    labels: dict[str, str]
    edges: tuple[tuple[str, str], ...]
    sites: dict[str, int]


def take(graph: Any, sites: Sequence[Site], number: int = 1) -> Picture:
    """Of a torch.fx graph and the sites found in it, which are numbered from ``number``."""
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    members: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        shape = f" {list(value.shape)}" if hasattr(value, "shape") else ""
        target = getattr(node.target, "__name__", str(node.target))
        labels[node.name] = f"{node.name}\n{node.op if node.op in ('placeholder', 'output') else target}{shape}"
        edges += [(source.name, node.name) for source in node.all_input_nodes]
    for i, site in enumerate(sites, number):
        members |= {name: i for name in (site.node, *site.nodes) if name in labels}
    return Picture(labels, tuple(edges), members)


def write(pictures: Sequence[Picture], sites: Sequence[Site], path: str | os.PathLike[str], around: int | None) -> None:
    """See :meth:`flash_inductor.Explanation.draw`."""
    path = Path(path)
    if path.suffix not in (*TEXT, *DRAWN):
        raise ValueError(f"path: expected a name that ends in {', '.join((*TEXT, *DRAWN))}, got {path.name!r}")
    if not pictures:
        raise ValueError("there is no graph to draw; flash_inductor.explain(model, *args) captures it")
    text = dot(pictures, sites, around)
    if path.suffix in TEXT:
        path.write_text(text)
        return
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(MISSING.format(suffix=path.suffix))
    done = subprocess.run(
        [program, f"-T{path.suffix[1:]}", "-o", str(path)], input=text, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"Graphviz's program dot failed: {done.stderr.strip()}")


def dot(pictures: Sequence[Picture], sites: Sequence[Site], around: int | None = None) -> str:
    """All graphs in Graphviz's language."""
    lines = ["digraph flash_inductor {", '  node [shape=box, fontsize=10, fontname="Helvetica"];']
    for i, picture in enumerate(pictures):
        kept = _near(picture, around)
        for name in (n for n in kept if n not in picture.sites):
            lines.append(f"  {_node(i, name, picture)};")
        for number in sorted(set(picture.sites.values())):
            site = sites[number - 1]
            title = f"{number}: {site.describe()}"
            lines.append(f"  subgraph cluster_{number} {{ label={_quoted(title)}; style=filled;")
            lines.append(f'    color="{"palegreen" if site.replaced else "khaki"}"; fontname="Helvetica";')
            lines += [f"    {_node(i, name, picture)};" for name, n in picture.sites.items() if n == number]
            lines.append("  }")
        lines += [f"  {_id(i, a)} -> {_id(i, b)};" for a, b in picture.edges if a in kept and b in kept]
    return "\n".join([*lines, "}"]) + "\n"


def _near(picture: Picture, around: int | None) -> dict[str, None]:
    """Names in the graph's order; of a graph without a site all."""
    if around is None or not picture.sites:
        return dict.fromkeys(picture.labels)
    neighbours: dict[str, list[str]] = {name: [] for name in picture.labels}
    for a, b in picture.edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    found, edge = set(picture.sites), set(picture.sites)
    for _ in range(around):
        edge = {other for name in edge for other in neighbours[name]} - found
        found |= edge
    return {name: None for name in picture.labels if name in found}


def _id(graph: int, name: str) -> str:
    return _quoted(f"{graph}.{name}")


def _node(graph: int, name: str, picture: Picture) -> str:
    return f"{_id(graph, name)} [label={_quoted(picture.labels[name])}]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
