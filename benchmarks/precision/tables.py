"""The measured errors as tables in Markdown, between a document's markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cases import DTYPES, ORDINARY
from .exact import RESULTS

Cell = dict[str, Any]


def figure(found: dict[str, float] | None) -> str:
    """Largest absolute and relative error, and how many elements are inf or NaN, or should be."""
    if found is None:
        return "-"
    text = f"{found['abs']:.1e} / {found['rel']:.1e}"
    return text + (f", **{found['wrong']} wrong**" if found["wrong"] else "")


def _share(cell: Cell) -> str:
    shares = [x["share"] for x in cell["errors"].values() if x is not None and x.get("share") is not None]
    return f"{max(shares):.2g}" if shares else "-"


def _table(first: str, rows: list[tuple[str, Cell]]) -> list[str]:
    lines = [f"| {first} | computed by | {' | '.join(RESULTS)} | of the bound |", "|---" * (len(RESULTS) + 3) + "|"]
    for label, cell in rows:
        figures = " | ".join(figure(cell["errors"].get(name)) for name in RESULTS)
        lines.append(f"| {label} | {cell['impl']} | {figures} | {_share(cell)} |")
    return [*lines, ""]


def markdown(data: dict[str, Any]) -> str:
    """All tables of a run."""
    head = data["header"]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    lines = [f"`{head['command']}` on {head['device']}, {versions}.", ""]
    ran = [cell for cell in data["cells"] if "errors" in cell]
    for dtype in DTYPES:
        rows = [("/".join(map(str, c["dims"])), c) for c in ran if c["group"] == ORDINARY and c["dtype"] == dtype]
        if rows:
            size = f"{rows[0][1]['q_len']} x {rows[0][1]['kv_len']}"
            lines += [f"**{dtype}**, causal, {size}, by head dim of query and value", "", *_table("D/Dv", rows)]
    groups = dict.fromkeys(c["group"] for c in ran if c["group"] != ORDINARY)
    for group in groups:
        rows = [(label(c), c) for c in ran if c["group"] == group]
        lines += [f"**{group[0].upper()}{group[1:]}**", "", *_table("case", rows)]
    return "\n".join(lines).strip()


def label(cell: Cell) -> str:
    """A hard case's name within its group."""
    return cell["name"].partition(": ")[2]


def fill(document: Path, data: dict[str, Any], device: str) -> None:
    """Replace what is between the document's markers of a device.

    Raises ValueError if it has no such markers.
    """
    begin, end = f"<!-- {device}: begin -->", f"<!-- {device}: end -->"
    text = document.read_text()
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"document: expected the markers {begin} and {end} in {document}, found none")
    document.write_text(f"{before}{begin}\n{markdown(data)}\n{end}{after}")
