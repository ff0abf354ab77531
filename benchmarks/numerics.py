"""Errors of attention and its gradients against float64: every kernel of ours next to SDPA's, ordinary and hard inputs.

    python benchmarks/numerics.py --out numerics.json --markdown docs/numerics.md       one GPU, about a minute
    python benchmarks/numerics.py --device cpu --markdown docs/numerics.md              the CPU's kernels
    python benchmarks/numerics.py --show numerics.json --markdown -                     tables of an earlier run

For each result the largest absolute error, the relative error by 2-norms, and the share of the bound that the roundings
allow (``precision/exact.py`` derives it).  Exit code 1 if a kernel of ours is above its bound, or has inf or NaN where
the inputs are finite and the exact result is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package beside this folder, installed or not

import torch
from precision import tables
from precision.cases import Case, cases
from precision.exact import RESULTS, exact, roundings
from precision.impls import Implementation, Unsupported, implementations
from torch import Tensor

from flash_inductor.bench.errors import in_one_line
from flash_inductor.reference import attention_backward, attention_forward

COMPILED = ("ours triton", "ours gluon")
MOST_SCORES = 1 << 30  # what holds all scores at once gets no larger problem


def expected(case: Case, tensors: Sequence[Tensor], device: str) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Exact results, and bounds of the errors; none where inputs aren't finite."""
    query, key, value, grad_out = tensors
    if all(bool(x.isfinite().all()) for x in tensors):
        return exact(query, key, value, grad_out, case.spec, roundings(query.dtype, device))
    results = attention_forward(query, key, value, case.spec)
    results += attention_backward(grad_out, None, query, key, value, case.spec)[:3]
    return dict(zip(RESULTS, results, strict=True)), None


def kinds(x: Tensor) -> Tensor:
    """0 where finite, else which of NaN, inf and -inf it is."""
    return torch.where(x.isnan(), 3, torch.where(x.isinf(), x.sign(), 0))


def compare(got: Tensor, want: Tensor, bound: Tensor | None) -> dict[str, float]:
    """Errors where both are finite; ``wrong`` counts where they aren't of the same kind."""
    got = got.double()
    wrong = kinds(got) != kinds(want)
    both = got.isfinite() & want.isfinite()
    error = (got - want)[both].abs()
    size = want[both].norm().item()
    found = {
        "abs": error.max().item() if error.numel() else 0.0,
        "rel": error.norm().item() / size if size else 0.0,
        "wrong": int(wrong.sum()),
    }
    if bound is not None:
        shares = torch.where(error == 0, 0.0, error / bound[both])
        found["share"] = shares.max().item() if shares.numel() else 0.0
    return found


def cell_of(case: Case, name: str, run: Implementation, tensors: Sequence[Tensor], exactly: Any) -> dict[str, Any]:
    """Errors of one implementation, or why it has none."""
    cell: dict[str, Any] = {"name": case.name, "group": case.group, "dtype": case.dtype, "dims": case.dims}
    cell |= {"impl": name, "q_len": case.q_len, "kv_len": case.kv_len}
    results, bounds = exactly
    try:
        if case.q_len * case.kv_len > MOST_SCORES and name in ("SDPA math", "written out"):
            raise Unsupported("the whole matrix of scores would not fit")
        got = run(case, tensors)
    except (Unsupported, NotImplementedError, RuntimeError, ValueError) as error:
        return {**cell, "refused": in_one_line(error)[:170]}
    cell["errors"] = {
        result: None if (x := got[result]) is None else compare(x, results[result], bounds and bounds[result])
        for result in RESULTS
    }
    return cell


def faults(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What of ours is outside of what is promised."""
    found = []
    for cell in cells:
        for result, figures in cell.get("errors", {}).items():
            if not cell["impl"].startswith("ours") or figures is None or "share" not in figures:
                continue
            if figures["wrong"] or not figures["share"] <= 1:
                found.append(f"{cell['name']}, {cell['impl']}: {result} {figures}")
        if cell["impl"].startswith("ours") and "refused" in cell and "OutOf" in cell["refused"]:
            found.append(f"{cell['name']}, {cell['impl']}: {cell['refused']}")
    return found


def warm(chosen: Sequence[Case], args: argparse.Namespace) -> None:
    """What one compiling process does: runs its share of the kernels, for what that leaves on disk."""
    index, workers = map(int, args.share.split("/"))
    kinds_of_code: dict[Any, tuple[Case, str]] = {}
    for case in chosen:
        for name in COMPILED:
            same_code = (name, case.dtype, case.dims, case.q_len, case.kv_len, *sorted(case.options))
            kinds_of_code.setdefault(same_code, (case, name))
    available = implementations(args.device)
    for case, name in list(kinds_of_code.values())[index::workers]:
        try:
            available[name](case, case.tensors(args.device))
        except Exception as error:  # it shows when the same is measured
            print(f"{case.name}, {name}: {error}")


def compile_all(args: argparse.Namespace, argv: Sequence[str]) -> None:
    begin = time.monotonic()
    command = [sys.executable, __file__, *argv, "--role", "compile", "--share"]
    children = [
        subprocess.Popen([*command, f"{i}/{args.workers}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(args.workers)
    ]
    failed = sum(child.wait() != 0 for child in children)
    print(f"# compiled for {time.monotonic() - begin:.0f} s in {args.workers} processes, {failed} failed", flush=True)


def header(device: str, argv: Sequence[str]) -> dict[str, Any]:
    versions: dict[str, Any] = {"torch": torch.__version__}
    if device == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cuDNN": torch.backends.cudnn.version()}
    return {
        "command": " ".join(["python", "benchmarks/numerics.py", *argv]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "versions": versions,
    }


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    cells = []
    for case in args.cases:
        tensors = case.tensors(args.device)
        exactly = expected(case, tensors, args.device)
        for name, run in implementations(args.device).items():
            cell = cell_of(case, name, run, tensors, exactly)
            cells.append(cell)
            words = cell.get("refused") or "  ".join(f"{n} {tables.figure(x)}" for n, x in cell["errors"].items())
            print(f"{case.name:55} {name:16} {words}", flush=True)
    return {"header": header(args.device, argv), "cells": cells}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--select", default="", metavar="TEXT", help="only cases with this in their name")
    add("--out", type=Path, help="write the figures there as JSON")
    add("--markdown", type=Path, metavar="DOCUMENT", help="put the tables between its markers; - prints them")
    add("--show", type=Path, metavar="JSON", help="measure nothing; tables of an earlier run")
    add("--workers", type=int, default=os.cpu_count(), help="processes that compile; 0 compiles while measuring")
    add("--role", choices=("main", "compile"), default="main", help=argparse.SUPPRESS)
    add("--share", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.cases = [case for case in cases(args.device) if args.select in case.name]
    if not args.cases:
        parser.error(f"--select: expected a part of a case's name, got {args.select!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.role == "compile":
        warm(args.cases, args)
        return 0
    if args.show:
        data = json.loads(args.show.read_text())
    else:
        if args.device == "cuda" and args.workers:
            compile_all(args, argv)
        begin = time.monotonic()
        data = measure(args, argv)
        print(f"# measured for {time.monotonic() - begin:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(data, indent=1, default=lambda x: None))
    if args.markdown == Path("-"):
        print(tables.markdown(data))
    elif args.markdown:
        device = "cpu" if data["header"]["device"] == "a CPU" else "cuda"
        tables.fill(args.markdown, data, device)
    problems = faults(data["cells"])
    for words in problems:
        print(f"BAD {words}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
