"""PNG plots of a run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import summary
from .cases import PUBLISHED

COLOURS = {"ours": "#d62728", "stock": "#7f7f7f", "cudnn": "#2ca02c", "flash": "#9467bd", "flex": "#1f77b4",
           "fa3": "#e377c2", "fa4": "#ff7f0e"}  # fmt: skip


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the data has cells for; the files written.  ImportError says how to get matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install -e ".[bench]"') from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    groups = summary.by_group(data["cells"])
    written = []
    if "anchors" in groups:
        written.append(_bars(groups["anchors"], data, folder / "anchors.png"))
    if "lengths" in groups:
        written.append(_curves(groups["lengths"], data, folder / "lengths.png"))
    return written


def shown(cells: list[dict[str, Any]]) -> list[str]:
    """Implementations with figures, ours first; kernels by name are left to the tables."""
    names = [
        n for n in summary.columns(cells) if ":" not in n and any("forward" in c["impls"].get(n, {}) for c in cells)
    ]
    return sorted(names, key=lambda n: n != summary.OURS)


def _caption(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"{data['device']}; {versions}; {data['command']}"


def _bars(cells: list[dict[str, Any]], data: dict[str, Any], path: Path) -> Path:
    """One row of bars for each case, forward and backward beside each other; published figures are hollow."""
    from matplotlib import pyplot

    names = shown(cells)
    published = [n for n in ("fa4",) if n not in names and any(n in PUBLISHED.get(c["name"], {}) for c in cells)]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 0.62 * len(cells) + 1.5), sharey=True, layout="constrained")
    height = 0.85 / (len(names) + len(published))
    for i, (axis, part) in enumerate(zip(axes, summary.PARTS, strict=True)):
        for j, name in enumerate([*names, *published]):
            style: dict[str, Any] = {"color": COLOURS[name]}
            if name in published:
                values = [PUBLISHED.get(c["name"], {}).get(name, (0, 0))[i] for c in cells]
                style = {"facecolor": "none", "edgecolor": COLOURS[name]}
            else:
                values = [c["impls"].get(name, {}).get(part, {}).get("tflops", 0.0) for c in cells]
            label = f"{name} (published)" if name in published else name
            axis.barh([row + j * height for row in range(len(cells))], values, height, label=label, **style)
        axis.set_xlabel(f"{part}, TFLOP/s of visible pairs")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks([row + 0.4 for row in range(len(cells))], [c["name"] for c in cells])
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names) + len(published))
    figure.supxlabel(_caption(data), fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _curves(cells: list[dict[str, Any]], data: dict[str, Any], path: Path) -> Path:
    """TFLOP/s over length: a row for each head dim and mask, forward and backward beside each other."""
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((c["case"]["head_dim"], c["case"]["causal"]) for c in cells))
    size = (11, 3.1 * len(kinds))
    figure, axes = pyplot.subplots(len(kinds), 2, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for row, (dim, causal) in zip(axes, kinds, strict=True):
        some = [c for c in cells if (c["case"]["head_dim"], c["case"]["causal"]) == (dim, causal)]
        for axis, part in zip(row, summary.PARTS, strict=True):
            for name in shown(some):
                points = [(c["case"]["length"], c["impls"][name][part]["tflops"]) for c in some
                          if part in c["impls"].get(name, {})]  # fmt: skip
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLOURS[name])
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"D {dim} {'causal' if causal else 'full'}, {part}", fontsize=9)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=7)
    figure.supxlabel(f"length N at 16k tokens or one sequence\n{_caption(data)}", fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
