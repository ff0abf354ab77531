"""Ratios, geometric means, the gate, and tables, all from the JSON data of a run; no GPU needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flash_inductor.bench.bounds import inaccurate

from .cases import PUBLISHED

OURS, STOCK = "ours", "stock"
PARTS = ("forward", "backward")
GATE = 0.98  # of stock's speed
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
Cell = dict[str, Any]


def is_ours(name: str) -> bool:
    return name.split(":")[0] == OURS


def peers(cell: Cell) -> list[str]:
    """The implementations that aren't ours and gave the right results."""
    return [name for name, found in cell["impls"].items() if not is_ours(name) and "forward" in found]


def ratio(cell: Cell, part: str, other: str, mine: str = OURS) -> float | None:
    """Speed of ``mine`` over that of ``other``; None unless both were timed.

    The median over the rounds of that round's ratio: the two ran within milliseconds of each other, at one clock.
    """
    a, b = (cell["impls"].get(name, {}).get(part) for name in (mine, other))
    if a is None or b is None:
        return None
    return statistics.median(y / x for x, y in zip(a["rounds"], b["rounds"], strict=False))


def best_peer(cell: Cell, part: str, published: bool = False) -> tuple[float, str] | None:
    """(ratio, name) of the fastest peer; with ``published`` also among figures of an earlier run, as "NAME*"."""
    found = [(r, name) for name in peers(cell) if (r := ratio(cell, part, name)) is not None]
    mine = cell["impls"].get(OURS, {}).get(part)
    if published and mine is not None:
        for name, figures in PUBLISHED.get(cell["name"], {}).items():
            found.append((mine["tflops"] / figures[PARTS.index(part)], f"{name}*"))
    return min(found, default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """NaN if there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def has_extras(cell: Cell) -> bool:
    """Whether the case has a window or a softcap."""
    return cell["case"]["window"] is not None or cell["case"]["softcap"] is not None


def against(cells: Sequence[Cell], peer: str) -> list[float]:
    """Ratios to ``peer`` in every figure: measured in this run, or else published."""
    found = []
    for cell in cells:
        for i, part in enumerate(PARTS):
            mine = cell["impls"].get(OURS, {}).get(part)
            measured = ratio(cell, part, peer)
            if measured is not None:
                found.append(measured)
            elif mine is not None and peer in PUBLISHED.get(cell["name"], {}):
                found.append(mine["tflops"] / PUBLISHED[cell["name"]][peer][i])
    return found


def accuracy_failures(cell: Cell) -> list[str]:
    """What is wrong with the results of our implementations."""
    failures = []
    references = [cell["impls"][name]["errors"] for name in peers(cell)]
    for name, found in cell["impls"].items():
        if not is_ours(name):
            continue
        if "error" in found:
            failures.append(f"{name}: {found['error']}")
        elif "errors" in found:
            worse = inaccurate(found["errors"], references, cell["case"]["dtype"])
            failures += [f"{name}: error of {what} is {times:.1f}x the best peer's" for what, times in worse.items()]
        if found.get("repeats") is False:
            failures.append(f"{name}: results differ between runs")
    return failures


def gate(cells: Sequence[Cell]) -> list[str]:
    """One line for each way in which this run breaks the promise "as accurate as others, never slower than stock"."""
    failures = []
    for cell in cells:
        failures += [f"{cell['name']}: {text}" for text in accuracy_failures(cell)]
        mine = cell["impls"].get(OURS, {})
        if "forward" not in mine and "error" not in mine:
            failures.append(f"{cell['name']}: {OURS} did not run: {mine.get('unsupported', 'not selected')}")
        for part in PARTS:
            if (speed := ratio(cell, part, STOCK)) is not None and speed < GATE:
                failures.append(f"{cell['name']}: {part} at {speed:.3f} of stock's speed")
    return failures if cells else ["nothing was measured"]


def means(cells: Sequence[Cell]) -> list[tuple[str, int, float, float]]:
    """(what, number of figures, geometric mean, least) of ratios."""
    groups: dict[str, list[float]] = {}

    def add(what: str, value: float | None) -> None:
        if value is not None:
            groups.setdefault(what, []).append(value)

    for cell in cells:
        for part in PARTS:
            best = best_peer(cell, part)
            add("all: ours / best peer of this run", best and best[0])
            add("all: ours / stock", ratio(cell, part, STOCK))
            add(f"{cell['group']}: ours / best peer of this run", best and best[0])
            if cell["name"] in PUBLISHED:
                best = best_peer(cell, part, published=True)
                add(f"{cell['group']}: ours / best peer, published figures included", best and best[0])
            add(f"{cell['group']}: ours / stock", ratio(cell, part, STOCK))
    extras = [cell for cell in cells if cell["group"] == "anchors" and has_extras(cell)]
    for peer in ("flex", "fa4"):
        for value in against(extras, peer):
            add(f"windows and softcap: ours / {peer}", value)
    return [(what, len(v), geometric_mean(v), min(v)) for what, v in groups.items()]


def behind(cells: Sequence[Cell], limit: float = 0.95) -> list[str]:
    """The figures in which ours is below ``limit`` of the best peer, published ones included; slowest first."""
    found = []
    for cell in cells:
        for part in PARTS:
            best = best_peer(cell, part, published=True)
            if best is not None and best[0] < limit:
                found.append((best[0], f"{best[0]:.3f} of {best[1]}: {cell['name']} {part}"))
    return [text for _, text in sorted(found)]


def ratio_text(cell: Cell, part: str, published: bool = True) -> str:
    best = best_peer(cell, part, published)
    return "-" if best is None else f"{best[0]:.2f} {best[1]}"


def figures(found: dict[str, Any] | None) -> str:
    if found is None or "unsupported" in found:
        return "-"
    if "error" in found or "backward" not in found:
        return "error"
    return "/".join(f"{found[part]['tflops']:.0f}" for part in PARTS)


def columns(cells: Sequence[Cell]) -> list[str]:
    """The implementations that ran, or failed, in one of the cells."""
    names = dict.fromkeys(name for cell in cells for name in cell["impls"])
    return [n for n in names if any("unsupported" not in cell["impls"].get(n, {"unsupported": ""}) for cell in cells)]


def by_group(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["group"], []).append(cell)
    for group in groups.values():
        group.sort(key=lambda c: (c["case"]["head_dim"], not c["case"]["causal"], c["case"]["length"])
                   if c["group"] == "lengths" else (0,))  # fmt: skip
    return groups


def worst_error(found: dict[str, Any] | None) -> str:
    errors = (found or {}).get("errors")
    return "-" if not errors else f"{max(errors.values()):.1e}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(r)} |" for r in (header, ["---", *["---:"] * (len(header) - 1)], *rows)]


def markdown(data: dict[str, Any]) -> str:
    """All tables of a run, headed by its command, device and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [f"`{data['command']}` on {data['device']}; {versions}; commit {data.get('commit', 'unknown')}.", ""]
    if data.get("ceilings"):
        ceilings = data["ceilings"]
        lines += [
            f"Ceilings in this run: bf16 product {ceilings['product_tflops']:.0f} TFLOP/s, "
            f"copy {ceilings['copy_gbs']:.0f} GB/s.",
            "",
        ]
    for group, cells in by_group(data["cells"]).items():
        names = columns(cells)
        lines += [f"### {group[0].upper()}{group[1:]}", ""]
        header = ["TFLOP/s forward/backward", *names, "forward / best", "backward / best", "error", "best peer's"]
        rows = []
        for cell in cells:
            best_error = min((max(cell["impls"][n]["errors"].values()) for n in peers(cell)), default=None)
            rows.append(
                [cell["name"], *(figures(cell["impls"].get(n)) for n in names), *(ratio_text(cell, p) for p in PARTS),
                 worst_error(cell["impls"].get(OURS)), "-" if best_error is None else f"{best_error:.1e}"]
            )  # fmt: skip
        lines += [*table(header, rows), ""]
    rows = [[what, str(count), f"{mean:.3f}", f"{least:.3f}"] for what, count, mean, least in means(data["cells"])]
    lines += ["### Means", "", *table(["ratio", "figures", "geometric mean", "least"], rows), ""]
    failures = gate(data["cells"])
    lines += ["### Gate", "", *(f"- {text}" for text in failures or ["Every cell passes."])]
    return "\n".join(lines)


def fill(document: Path, data: dict[str, Any]) -> None:
    """Put the tables between the two markers of a document; ValueError if it lacks them."""
    text = document.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{document}: expected the markers {BEGIN} and {END}, once each and in this order")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    document.write_text(f"{before}{BEGIN}\n{markdown(data)}\n{END}{after}")


def print_summary(cells: Sequence[Cell]) -> None:
    print("\nratios of speed, ours over others: figures, geometric mean, least")
    for what, count, mean, least in means(cells):
        print(f"    {what:68}{count:4}{mean:8.3f}{least:8.3f}")
    if slower := behind(cells):
        print("figures below 0.95 of the best peer (* published):", *slower, sep="\n    ")
    failures = gate(cells)
    print("gate: " + ("passed" if not failures else f"{len(failures)} failures"))
    for text in failures:
        print(f"    {text}")
