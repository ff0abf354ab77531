"""``flash-inductor tune``: exit code 0 if the table was written, 1 if nothing could be measured, 2 without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench import positive
from .errors import UsageError

NOTHING = (
    "there is nothing to tune on a CPU, where each problem has one kernel; run this on the machine with the GPU that "
    "the table is for"
)
FEATURES = ("full", "causal", "window", "softcap")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest kernels and tiles on this GPU, and keep them in a table",
        description="Time every kernel that takes a problem, and every tile of the Triton kernels, on this GPU, and "
        "write what is fastest into your own table, which the package then prefers to its own. Takes minutes with the "
        "default sizes; name those of your models to be faster and more exact.",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128, 256), default=[64, 128, 256], metavar="D")
    parser.add_argument("--length", type=positive, nargs="+", default=[1024, 4096, 16384], metavar="N")
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES), help="default: all")
    parser.add_argument("--tokens", type=positive, default=16384, metavar="N", help="batch x length (%(default)s)")
    parser.add_argument("--width", type=positive, default=2048, metavar="N", help="heads x head dim (%(default)s)")
    parser.add_argument("--window", type=positive, default=512, metavar="W", help="of the windowed cases (%(default)s)")
    parser.add_argument("--only", choices=("kernels", "tiles"), help="measure and replace only these")
    parser.add_argument("--ms", type=float, default=20.0, help="time to measure each number for (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="the table (default: where the package reads it)")
    parser.add_argument("--json", action="store_true", help="print this GPU's part of the table as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from .. import config
    from ..ops import choice, tuned

    if not torch.cuda.is_available():
        raise UsageError(NOTHING)
    path = Path(args.out) if args.out else config.table_path(config.get_config())
    if path is None:
        raise UsageError("Config.table is off, so no table would be read; unset FLASH_INDUCTOR_TABLE, or pass --out")
    console = Console(stderr=args.json)
    capability = choice.device_limits(torch.cuda.current_device())[0]
    found = cases(args.head_dim, args.length, args.features, args.tokens, args.width, args.window)
    gpu = measure(found, capability, args.ms, args.only, console)
    if not gpu.get("kernels") and not gpu.get("tiles"):
        console.print("nothing could be measured: every kernel refused or failed", style="bold red")
        return 1
    if args.only:
        gpu = {**previous(path, capability), **gpu}
    tuned.write(path, capability, gpu)
    tuned.forget()
    console.print(f"{len(gpu.get('kernels', []))} rows of kernels and {len(gpu.get('tiles', []))} of tiles for")
    console.print(
        f"{gpu['name']} (compute capability {capability / 10}) are now in {path}", highlight=False, soft_wrap=True
    )
    in_force = config.table_path(config.get_config())
    if in_force is None or in_force.resolve() != path.resolve():
        console.print(f"to use it, set {config.ENV_PREFIX}TABLE={path}", highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps(gpu, indent=1))
    return 0


def cases(
    head_dims: Sequence[int], lengths: Sequence[int], features: Sequence[str], tokens: int, width: int, window: int
) -> list[Any]:
    """What is measured: each length and head dim with each feature; softcap is measured with causal masks."""
    from ..bench import tuning

    kinds: dict[str, tuple[bool, int | None, float | None]] = {
        "full": (False, None, None),
        "causal": (True, None, None),
        "window": (True, window, None),
        "softcap": (True, None, 50.0),
    }
    chosen = [kinds[name] for name in dict.fromkeys(features)]
    return tuning.cases(dict.fromkeys(head_dims), chosen, sorted(set(lengths)), tokens, width)


def previous(path: Path, capability: int) -> dict[str, Any]:
    """What the file has for this GPU; empty where it can't be read."""
    from ..ops import tuned

    try:
        tuned.parse(path.read_text())
        return dict(json.loads(path.read_text())["gpus"].get(str(capability), {}))
    except (OSError, ValueError):
        return {}


def measure(cases: Sequence[Any], capability: int, ms: float, only: str | None, console: Any) -> dict[str, Any]:
    """This GPU's entry of the table."""
    import torch
    import triton

    from ..bench import ranking, timing, tuning
    from .bench_run import progress

    clock = timing.GpuClock()
    kernels: list[ranking.Measured] = []
    tiles: dict[tuple[str, int], list[dict[Any, float]]] = {}
    # tiles don't depend much on the length: each head dim and feature is measured at its longest
    longest = {(c.head_dim, c.causal, c.window, c.softcap): c for c in cases}
    rounds = (0 if only == "tiles" else len(cases)) + (0 if only == "kernels" else len(longest))
    with progress(console) as bar:
        task = bar.add_task("", total=rounds)

        def say(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False)

        for case in cases if only != "tiles" else ():
            bar.update(task, description=f"kernels: {case}"[:44])
            kernels += tuning.kernels(case, clock, ms, say)
            bar.advance(task)
        for case in longest.values() if only != "kernels" else ():
            bar.update(task, description=f"tiles: {case}"[:44])
            for kind, times in tuning.tiles(case, clock, ms, say, tuning.every):
                tiles.setdefault((kind, case.head_dim), []).append(times)
            bar.advance(task)
    rows = ranking.rows([m for m in kernels if len(m.ms) > 1], capability // 10, always=True)
    entry: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
    if only != "tiles":
        entry["kernels"] = [row_data(row) for row in rows]
    if only != "kernels":
        ranked = {key: tuning.ordered([ms for ms in found if ms]) for key, found in tiles.items()}
        entry["tiles"] = [
            {"kind": kind, "head_dim": dim, "tiles": [list(config) for config in order]}
            for (kind, dim), order in ranked.items()
            if order
        ]
    return entry


def row_data(row: Any) -> dict[str, Any]:
    """A row of kernels as the file has it."""
    return {**row._asdict(), "lengths": list(row.lengths), "kernels": list(row.kernels)}
