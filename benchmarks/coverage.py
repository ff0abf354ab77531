"""How much of the attention in real models the package replaces, and whether what it makes of them is right.

    python benchmarks/coverage.py                             all models and modes: the tables of docs/coverage.md
    python benchmarks/coverage.py --check --out cells.json    also compares outputs and gradients with eager
    python benchmarks/coverage.py --families decoder,timm --modes train,right
    python benchmarks/coverage.py --families more-decoders,more-encoders,more-vision      further architectures
    python benchmarks/coverage.py --models llama,t5 --check --backend inductor

Runs on the CPU.  Sites are counted by ``zoo/detector.py``, which shares no code with the package.  A model is traced,
the pass rewrites its graphs, and they are run as they are: Inductor isn't needed to count.  A cell is one
(architecture, implementation, mode); coverage is the mean over cells of replaced / all sites.  The comparison turns
dropout off and leaves out padded rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

os.environ.setdefault("FLASH_INDUCTOR_STRICT", "1")  # an error in the matcher must be seen, not stepped over

import torch
from zoo import REGISTRY, Entry
from zoo.compare import Comparison, compare, has_dropout
from zoo.measure import Coverage, measure
from zoo.modes import MAIN, MODES

SPLITS = {
    "default implementation, train": lambda c: c.mode == "train" and c.default,
    "default implementation, eval": lambda c: c.mode == "eval",
    "eager implementation, train": lambda c: c.mode == "train" and c.implementation == "eager",
    "right-padded, train": lambda c: c.mode == "right",
    "left-padded, train": lambda c: c.mode == "left",
    "gradient checkpointing": lambda c: c.mode == "checkpoint",
    "packed documents": lambda c: c.mode == "packed",
    "with a KV cache": lambda c: c.mode == "cache",
    "dynamic=True": lambda c: c.mode == "dynamic",
    "a 4-D mask as input": lambda c: c.mode == "mask4d",
}


@dataclass
class Cell:
    """One architecture with one implementation in one mode; ``error`` is set if it failed."""

    model: str
    family: str
    implementation: str
    default: bool  # it is the implementation that the library picks
    mode: str
    coverage: Coverage | None = None
    comparison: Comparison | None = None
    error: str | None = None

    @property
    def share(self) -> float:
        return self.coverage.replaced / self.coverage.sites if self.coverage and self.coverage.sites else 0.0

    @property
    def wrong(self) -> bool:
        return self.comparison is not None and not self.comparison.right


def cells_of(entry: Entry, modes: list[str]) -> list[Cell]:
    """The cells of an entry: in eval its default implementation only, padded if it takes a mask."""
    cells = []
    for mode in modes:
        for implementation in entry.implementations[: 1 if mode == "eval" else None]:
            if MODES[mode].applies(entry):
                default = implementation == entry.implementations[0]
                cells.append(Cell(entry.name, entry.family, implementation, default, mode))
    return cells


def fill(cell: Cell, check: bool, backend: str | None) -> None:
    """Measure a cell, and compare; a failure is written into it."""
    mode, entry = MODES[cell.mode], REGISTRY[cell.model]
    options = {"train": mode.train, "dynamic": mode.dynamic}
    try:
        model, inputs = mode.make(entry, cell.implementation)
        if check and not (mode.train and has_dropout(model)):
            cell.comparison, cell.coverage = compare(model, inputs, backend=backend, **options)
            return
        cell.coverage = measure(model, inputs, **options)
        if check:
            cell.comparison, _ = compare(model, inputs, backend=backend, **options)
    except Exception as raised:
        error = getattr(raised, "inner_exception", raised)  # Dynamo wraps what a backend raises
        cell.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def load(paths: list[Path]) -> list[Cell]:
    """The cells of earlier runs; a cell that is in several is the last one's."""
    found: dict[tuple[str, str, str], Cell] = {}
    for path in paths:
        for data in json.loads(path.read_text()):
            parts = {"coverage": Coverage, "comparison": Comparison}
            made = {name: kind(**data[name]) if data[name] else None for name, kind in parts.items()}
            cell = Cell(**{**data, **made})
            found[cell.model, cell.implementation, cell.mode] = cell
    return list(found.values())


def line(cell: Cell) -> str:
    start = f"{cell.model:26} {cell.implementation:8} {cell.mode:6}"
    if cell.error is not None and cell.coverage is None:
        return f"{start} failed: {cell.error}"
    assert cell.coverage is not None
    c, text = cell.coverage, ""
    if cell.comparison is not None:
        verdict = "right" if cell.comparison.right else "WRONG"
        text = f"{verdict} (outputs {cell.comparison.output:.0e}, gradients {cell.comparison.gradient:.0e})"
        text += "" if cell.comparison.right else f" at {cell.comparison.worst}"
    reasons = Counter(x["reason"] for x in c.left)
    left = "; ".join(f"{n} x {reason}" for reason, n in reasons.items())
    error = f" failed: {cell.error}" if cell.error else ""
    return f"{start} {c.replaced}/{c.sites} {text} {left}{error}".rstrip()


def summary(cells: list[Cell]) -> str:
    """The table of the splits."""
    rows = [
        "| mode | coverage (mean over cells) | sites replaced | cells | compared | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for title, chosen in SPLITS.items():
        group = [c for c in cells if chosen(c)]
        if not group:
            continue
        sites = sum(c.coverage.sites for c in group if c.coverage)
        replaced = sum(c.coverage.replaced for c in group if c.coverage)
        compared = [c for c in group if c.comparison]
        share, wrong = mean(c.share for c in group), sum(c.wrong for c in compared)
        rows.append(f"| {title} | {share:.1%} | {replaced}/{sites} | {len(group)} | {len(compared)} | {wrong} |")
    return "\n".join(rows)


def table(cells: list[Cell]) -> str:
    """A row for each model and implementation, a column for each mode."""
    modes = [m for m in MODES if any(c.mode == m for c in cells)]
    rows = ["| model | implementation | " + " | ".join(modes) + " |", "|---|---|" + "---|" * len(modes)]
    found = {(c.model, c.implementation, c.mode): c for c in cells}
    for model, implementation in dict.fromkeys((c.model, c.implementation) for c in cells):
        row = []
        for mode in modes:
            cell = found.get((model, implementation, mode))
            if cell is None:
                row.append("")
            elif cell.coverage is None:
                row.append("failed")
            else:
                row.append(f"{cell.coverage.replaced}/{cell.coverage.sites}" + (" WRONG" if cell.wrong else ""))
        rows.append(f"| {model} | {implementation} | " + " | ".join(row) + " |")
    return "\n".join(rows)


def left_alone(cells: list[Cell]) -> str:
    """The sites left alone, by reason."""
    where: dict[str, Counter[str]] = {}
    for cell in cells:
        for site in cell.coverage.left if cell.coverage else ():
            where.setdefault(site["reason"], Counter())[f"{cell.model} ({cell.implementation})"] += 1
    rows = ["| reason | sites in |", "|---|---|"]
    for reason, models in sorted(where.items(), key=lambda item: -sum(item[1].values())):
        rows.append(f"| {reason} | {', '.join(models)} |")
    return "\n".join(rows)


def tables(cells: list[Cell]) -> str:
    return "\n\n".join((summary(cells), table(cells), left_alone(cells)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    families = list(dict.fromkeys(e.family for e in REGISTRY.values()))
    usual = [f for f in families if not f.startswith("more-")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families",
        default=",".join(usual),
        help=f"comma-separated, of {', '.join(families)} (default: %(default)s)",
    )
    parser.add_argument("--models", default="", help="comma-separated; default: all of the families")
    parser.add_argument(
        "--modes",
        default=",".join(MAIN),
        help=f"comma-separated, of {', '.join(MODES)} (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="compare outputs and gradients with eager")
    parser.add_argument("--backend", help="compile after the pass with this backend to compare (default: none)")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print the tables of earlier runs' --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there as JSON")
    args = parser.parse_args(argv)
    for option, known in (("families", families), ("models", list(REGISTRY)), ("modes", list(MODES))):
        values = [v for v in getattr(args, option).split(",") if v]
        if unknown := [v for v in values if v not in known]:
            parser.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
        setattr(args, option, values)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.show:
        print(tables(load(args.show)))
        return 0
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = [REGISTRY[m] for m in args.models] or [e for e in REGISTRY.values() if e.family in args.families]
    missing = {e.library for e in chosen if not e.available}
    begin = time.perf_counter()
    cells: list[Cell] = []
    for entry in chosen:
        for cell in cells_of(entry, args.modes) if entry.available else ():
            fill(cell, args.check, args.backend)
            cells.append(cell)
            print(line(cell), flush=True)
            if args.out is not None:  # after each cell: an interrupted run keeps what it measured
                args.out.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n")
    print(f"\n{tables(cells)}\n")
    if missing:
        print(f"not installed, their models are left out: {', '.join(sorted(missing))}")
    print(f"torch {torch.__version__}, {len(cells)} cells in {time.perf_counter() - begin:.0f} s")
    return int(any(c.wrong or c.error for c in cells))


if __name__ == "__main__":
    sys.exit(main())
