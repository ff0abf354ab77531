"""The text and the table of an Explanation."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Explanation, Site

COLUMNS = ("#", "where", "form", "recognised as", "kernel")
WIDTH = 100


def summary(e: Explanation) -> str:
    """'2 of 3 attention sites replaced in 1 graph, 1 graph break'."""
    text = f"{e.replaced} of {_count(len(e.sites), 'attention site')} replaced"
    if not e.sites:
        text = "no attention found"
    if e.graphs is not None:
        text += f" in {_count(e.graphs, 'graph')}"
    if e.graph_breaks:
        text += f", {_count(len(e.graph_breaks), 'graph break')}"
    return text


def rows(e: Explanation) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each site."""
    return [
        (
            str(number),
            site.location or site.node,
            site.form,
            site.spec.describe() if site.spec is not None else "-",
            (site.kernel or "replaced") if site.replaced else "left alone",
        )
        for number, site in enumerate(e.sites, 1)
    ]


def as_text(e: Explanation) -> str:
    """Plain text, for print and logs."""
    lines = [f"flash_inductor: {summary(e)}"]
    if e.sites:
        table = [COLUMNS, *rows(e)]
        widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
        lines.append("")
        for row, site in zip(table, (None, *e.sites), strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            if site is not None:
                lines.extend(f"{' ' * (widths[0] + 2)}{line}" for line in _details(site))
    lines.extend(["", *notes(e)] if notes(e) else [])
    return "\n".join(lines)


def as_rich(e: Explanation) -> Any:
    """A rich table, for ``rich.print``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"flash_inductor: {summary(e)}", title_justify="left", show_lines=True)
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for row, site in zip(rows(e), e.sites, strict=True):
        where = Text.assemble(row[1], *_lines("cyan", site.source), *_lines("dim", site.module))
        meaning = Text.assemble(row[3], *_lines("dim", *(f"{role} {shape}" for role, shape in site.shapes.items())))
        last = Text.assemble((row[4], "green" if site.replaced else "yellow"), *_lines("", site.cause))
        last.append_text(Text.assemble(*_lines("bold", site.remedy)))
        table.add_row(row[0], where, Text(row[2]), meaning, last)
    return Group(*([table] if e.sites else [Text(f"flash_inductor: {summary(e)}")]), *map(Text, notes(e)))


def _lines(style: str, *texts: str | None) -> list[tuple[str, str]]:
    """Each text on a line of its own, for Text.assemble."""
    return [("\n" + text, style) for text in texts if text]


def notes(e: Explanation) -> list[str]:
    """What to know beside the sites: graph breaks, and what it means that there are no sites."""
    lines = [f"graph break: {reason}" for reason in dict.fromkeys(e.graph_breaks or ())]
    if e.graph_breaks:
        lines.append("What runs between two graphs is not seen, and attention cut in two by a break is not recognised.")
    return [*lines, *e.hints]


def _details(site: Site) -> list[str]:
    lines = [site.source] if site.source else []
    for word, text in (("why", site.cause), ("fix", site.remedy)):
        if text:
            lines += textwrap.wrap(f"{word}: {text}", WIDTH, subsequent_indent=" " * 5)
    return lines


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
