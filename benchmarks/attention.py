"""The whole grid of attention problems, with every implementation that is installed, in one run on one device.

    python benchmarks/attention.py --out attention.json --plots benchmarks/results/plots --gate
    python benchmarks/attention.py --select 'anchors.*D128' --impls ours,cudnn,stock
    python benchmarks/attention.py --budget 300 --resume        what matters most first; go on with it later
    python benchmarks/attention.py --show attention.json --markdown docs/performance.md
    python benchmarks/attention.py --device cpu --tiny          the same code with toy sizes

Everything is compiled first, by several processes at once, which leave it in the caches on disk.  Then each output and
gradient is compared with the formula in float64, and what is right is timed: implementations take turns, with a cold L2
and a queue that the host keeps full, so the times are the GPU's.  The forward is that of training: it saves what the
backward needs.  TFLOP/s count visible pairs only, two products forward and five backward.

The gate fails where ours is slower than stock (x 0.98), less accurate than the best peer (2 x), or doesn't run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package beside this folder, installed or not

from grid import cases as grid_cases
from grid import summary, supervise
from grid.store import Store

COMPILED = ("flex", "stock", "ours", "ours:triton", "ours:gluon", "fa4")  # what leaves something in the caches
MOST_BREAKS = 3  # cases on which an implementation may hang or die before it is left out everywhere
ALL = ("ours", "stock", "cudnn", "flash", "flex", "fa3", "fa4", "ours:triton", "ours:gluon", "ours:cudnn", "ours:flash")


def header(device: str, argv: Sequence[str]) -> dict[str, Any]:
    """What a run's file says of the run."""
    import torch

    versions: dict[str, Any] = {"torch": torch.__version__}
    if device == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    return {
        "command": " ".join(["python", "benchmarks/attention.py", *argv]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def compile_share(args: argparse.Namespace, chosen: Sequence[grid_cases.Case]) -> None:
    """What one compiling process does.  Failures show when the same thing is measured."""
    from flash_inductor.bench import impls, measure

    prepare_torch()
    index, workers = map(int, args.share.split("/"))
    tasks = [(case, name) for case in chosen for name in args.impls if name in COMPILED]
    share = grid_cases.partition(tasks, impls.COMPILE_SECONDS, workers)[index]
    for case, name in sorted(share, key=lambda task: task[0].importance):
        try:
            measure.compile_only(case, name, args.device)
        except Exception as error:
            if measure.is_fatal(error):
                raise


def prepare_torch() -> None:
    import torch._dynamo
    import torch._functorch.config

    warnings.filterwarnings("ignore")
    torch._functorch.config.donated_buffer = False  # a backward that is run again keeps its inputs
    torch._dynamo.config.recompile_limit = 1000


def measure_all(args: argparse.Namespace, chosen: Sequence[grid_cases.Case], store: Store, progress: Path) -> None:
    """Measure what isn't in the store yet, until the time is over."""
    from flash_inductor.bench import measure, timing

    prepare_torch()
    clock = timing.GpuClock() if args.device == "cuda" else timing.CpuClock()
    if args.device == "cuda" and "ceilings" not in store.data:
        store.data["ceilings"] = timing.ceilings()
        print("# ceilings: " + ", ".join(f"{k} {v:.0f}" for k, v in store.data["ceilings"].items()), flush=True)
    print("# case [ours / best peer, forward and backward]  TFLOP/s forward/backward  largest error", flush=True)
    took: list[float] = []
    for case in chosen:
        if store.has(case, args.impls):
            continue
        if time.time() + (sorted(took)[len(took) // 2] if took else 0.0) > args.deadline:
            print(f"# the time is over before {case.group}: {case}", flush=True)
            return
        breaks = Counter(impl for _, impl in store.broken)
        given_up = [name for name in args.impls if breaks[name] >= MOST_BREAKS]
        cell = measure.measure(
            case,
            [name for name in args.impls if name not in given_up],
            args.device,
            clock,
            rounds=args.rounds,
            total_ms=args.rep,
            told=lambda case, impl: supervise.tell(progress, case, impl),
            broken=store.broken,
        )
        cell["impls"] |= {name: {"error": f"left out: it broke on {breaks[name]} cases"} for name in given_up}
        took.append(cell["seconds"])
        store.add(cell)
        print_cell(cell)


def print_cell(cell: dict[str, Any]) -> None:
    """A line with ratios and figures, ours first, and one for each thing that went wrong."""
    ratios = [summary.best_peer(cell, part) for part in summary.PARTS]
    ratio = " ".join("-" if best is None else f"{best[0]:.2f} {best[1]}" for best in ratios)
    ran = {name: found for name, found in cell["impls"].items() if "forward" in found and "backward" in found}
    figures = "  ".join(f"{name} {summary.figures(found)}" for name, found in ran.items())
    errors = [max(found["errors"].values()) for name, found in ran.items() if not summary.is_ours(name)]
    mine = summary.worst_error(cell["impls"].get(summary.OURS))
    print(f"{cell['name']:48} [{ratio}]  {figures}  error {mine}, peer {min(errors, default=0.0):.1e}", flush=True)
    for name, found in cell["impls"].items():
        if "error" in found and not summary.is_ours(name):
            print(f"    {name}: {found['error']}", flush=True)
    for text in summary.accuracy_failures(cell):
        print(f"    BAD {text}", flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--select", default="", metavar="REGEX", help="only cases whose 'group: name' it is found in")
    add("--impls", default=",".join(ALL), help="comma-separated (default: %(default)s)")
    add("--out", type=Path, default=Path("attention.json"), help="JSON, written after every cell (%(default)s)")
    add("--resume", action="store_true", help="keep the cells that are in --out already")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop in time, compiling included")
    add("--rep", type=float, default=40.0, metavar="MS", help="time of measurement for each number (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each implementation (%(default)s)")
    add("--workers", type=int, default=os.cpu_count(), help="processes that compile; 0 compiles while measuring")
    add("--compile-seconds", type=float, default=180.0, help="the most they may take (%(default)s)")
    add("--hang", type=float, default=90.0, metavar="SECONDS", help="when to give an implementation up (%(default)s)")
    add("--gate", action="store_true", help="exit 1 where ours is slower than stock, inaccurate, or missing")
    add("--plots", type=Path, metavar="FOLDER", help="draw PNGs there (needs matplotlib)")
    add("--markdown", type=Path, metavar="DOCUMENT", help="put the tables between its markers; - prints them")
    add("--show", type=Path, metavar="JSON", help="measure nothing; summary, plots, tables and gate of an earlier run")
    add("--list", action="store_true", help="print the cases in their order")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="toy sizes")
    add("--in-process", action="store_true", help="no other processes: a hang or a crash ends the run")
    add("--role", choices=("main", "compile", "measure"), default="main", help=argparse.SUPPRESS)
    add("--share", default="0/1", help=argparse.SUPPRESS)
    add("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.impls = args.impls.split(",")
    if unknown := [name for name in args.impls if name not in ALL]:
        parser.error(f"--impls: expected some of {', '.join(ALL)}, got {', '.join(unknown)}")
    try:
        cases = grid_cases.tiny_grid() if args.tiny else grid_cases.grid()
        args.cases = grid_cases.select(cases, args.select)
    except ValueError as error:
        parser.error(f"--select: {error}")
    if args.deadline is None:
        args.deadline = time.time() + args.budget
    return args


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Compile, measure; the data of the run."""
    store = Store.open(args.out, header(args.device, argv), args.resume)
    store.save()
    progress = args.out.with_name(f"{args.out.name}.progress")
    try:
        if args.in_process:
            measure_all(args, args.cases, store, progress)
            return store.data
        passed_on = [*argv, "--deadline", str(args.deadline)]
        script = str(Path(__file__))
        if args.workers:
            # Half of the time at most: what isn't compiled by then compiles when it is measured.
            seconds = min(args.compile_seconds, 0.5 * (args.deadline - time.time()))
            begin = time.monotonic()
            failures = supervise.compile_all(supervise.own_command(script, passed_on, "compile"), args.workers, seconds)
            print(f"# compiled for {time.monotonic() - begin:.0f} s in {args.workers} processes", flush=True)
            for words in sorted(set(failures)):
                print(f"# {failures.count(words)} of them failed: {words[:200]}", flush=True)
        command = supervise.own_command(script, [*passed_on, "--resume"], "measure")

        def reload() -> Store:
            return Store(args.out, json.loads(args.out.read_text()))

        try:
            supervise.watch(command, reload, progress, args.hang, args.deadline + 20)
        except RuntimeError as error:  # what was measured until then is still worth a summary
            print(f"# stopped: {error}", flush=True)
            return {**reload().data, "stopped": str(error)}
        return reload().data
    finally:
        progress.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    if args.role == "compile":
        compile_share(args, args.cases)
        return 0
    if args.role == "measure":
        progress = args.out.with_name(f"{args.out.name}.progress")
        measure_all(args, args.cases, Store.open(args.out, header(args.device, argv), resume=True), progress)
        return 0
    if args.list:
        print("\n".join(f"{case.group}: {case}" for case in args.cases))
        return 0
    data = json.loads(args.show.read_text()) if args.show else run(args, argv)
    summary.print_summary(data["cells"])
    if args.plots:
        from grid import plots

        for path in plots.draw(data, args.plots):
            print(f"drew {path}")
    if args.markdown == Path("-"):
        print(summary.markdown(data))
    elif args.markdown:
        summary.fill(args.markdown, data)
    return 1 if data.get("stopped") or (args.gate and summary.gate(data["cells"])) else 0


if __name__ == "__main__":
    sys.exit(main())
