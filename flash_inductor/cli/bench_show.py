"""Tables and plots of what bench measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench.bounds import inaccurate
from .errors import UsageError

PARTS = ("forward", "backward")
PLOTS = (".png", ".svg", ".pdf")


def failures(cell: Mapping[str, Any]) -> list[str]:
    """In which ways ours failed in a cell."""
    found = cell["impls"]["ours"]
    if "error" in found or "unsupported" in found:
        return [f"{cell['name']}: ours: {found.get('error') or found['unsupported']}"]
    peers = [x["errors"] for name, x in cell["impls"].items() if name != "ours" and "forward" in x]
    worse = inaccurate(found["errors"], peers, cell["case"]["dtype"])
    return [f"{cell['name']}: error of {what} is {times:.1f} x the best other's" for what, times in worse.items()]


def cell_table(cell: Mapping[str, Any], console: Console) -> None:
    """One case: a row for each implementation that ran, and a line for each that didn't."""
    table = Table(title=cell["name"], title_justify="left")
    table.add_column("")
    for part in PARTS:
        table.add_column(f"{part} ms", justify="right")
        table.add_column("TFLOP/s", justify="right")
        table.add_column("ours is", justify="right")
    table.add_column("error", justify="right")
    rest = []
    mine = cell["impls"]["ours"]
    for name, found in cell["impls"].items():
        if "forward" not in found:
            rest.append(f"  {name}: {found.get('error') or found.get('unsupported')}")
            continue
        row = [name]
        for part in PARTS:
            ratio = f"{found[part]['ms'] / mine[part]['ms']:.2f}x" if part in mine and name != "ours" else ""
            row += [f"{found[part]['ms']:.3f}", f"{found[part]['tflops']:.3g}", ratio]
        table.add_row(*row, f"{max(found['errors'].values()):.1e}", style="bold" if name == "ours" else "")
    console.print(table)
    console.print(f"[dim]errors against {cell['checked_against']}, relative; 'ours is 2x' is twice as fast[/dim]")
    for line in rest:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def model_table(data: Mapping[str, Any], console: Console) -> None:
    replaced = sum(site["replaced"] for site in data["sites"])
    table = Table(title=f"{data['target']}: {data['step']}", title_justify="left")
    for name in ("", "step ms", "ours is", "first step s", "peak MiB", "error"):
        table.add_column(name, justify="right" if name else "left")
    mine = data["implementations"]["ours"]
    for name, found in data["implementations"].items():
        table.add_row(
            name,
            f"{found['ms']:.2f}",
            "" if name == "ours" else f"{found['ms'] / mine['ms']:.2f}x",
            f"{found['first_s']:.1f}",
            f"{found['peak_mib']:.0f}" if "peak_mib" in found else "-",
            f"{found['error']:.1e}" if "error" in found else "-",
            style="bold" if name == "ours" else "",
        )
    console.print(table)
    console.print(f"{replaced} of {len(data['sites'])} attention sites replaced", highlight=False)
    for reason in dict.fromkeys(site["reason"] for site in data["sites"] if not site["replaced"]):
        console.print(f"  left alone: {reason}", style="yellow", highlight=False, soft_wrap=True)
    if data["not_checked"]:
        console.print(f"[yellow]errors unknown[/yellow]: {data['not_checked']}", highlight=False)


def check_plot(path: str) -> None:
    """UsageError where a plot can't be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError('--plot needs matplotlib; pip install "flash-inductor[plot]"') from error
    if Path(path).suffix not in PLOTS:
        raise UsageError(f"--plot: expected a name that ends in {', '.join(PLOTS)}, got {path!r}")
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--plot: there is no folder {Path(path).resolve().parent}")


def plot(data: Mapping[str, Any], path: str) -> None:
    """Bars: TFLOP/s of each case and implementation, forward beside backward; of a model the time of its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if "model" in data:
        found = data["model"]["implementations"]
        figure, axis = pyplot.subplots(figsize=(7, 0.5 * len(found) + 1.5), layout="constrained")
        axis.barh(list(found), [x["ms"] for x in found.values()])
        axis.invert_yaxis()
        axis.set_xlabel("ms a step")
        axis.set_title(f"{data['model']['target']}: {data['model']['step']}", fontsize=9)
    else:
        cells = data["cells"]
        names = list(dict.fromkeys(n for c in cells for n, x in c["impls"].items() if "forward" in x))
        figure, axes = pyplot.subplots(1, 2, figsize=(12, 0.7 * len(cells) + 1.5), sharey=True, layout="constrained")
        height = 0.85 / max(1, len(names))
        for axis, part in zip(axes, PARTS, strict=True):
            for j, name in enumerate(names):
                values = [c["impls"].get(name, {}).get(part, {}).get("tflops", 0.0) for c in cells]
                axis.barh([row + j * height for row in range(len(cells))], values, height, label=name)
            axis.set_xlabel(f"{part}, TFLOP/s of visible pairs")
        axes[0].set_yticks([row + 0.4 for row in range(len(cells))], [c["name"] for c in cells])
        axes[0].invert_yaxis()
        axes[1].legend(fontsize=8)
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    figure.supxlabel(f"{data['device']}; {versions}", fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
