"""Measures what the tuning tables say, and prints tables to put in their place.

    python benchmarks/tune.py kernels --out kernels.json        every kernel of ours: rows of kernels/choices.py
    python benchmarks/tune.py kernels --measured attention.json the same from a run of benchmarks/attention.py
    python benchmarks/tune.py configs --out configs.json        every entry of kernels/configs.py, reordered

bf16, at 16k tokens and 2048 features.  What is timed against each other takes turns.  A configuration whose results are
not those of the first is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from flash_inductor.bench import ranking, tuning
from flash_inductor.bench.case import Case
from flash_inductor.bench.tuning import SHARE, ordered

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def kernel_cases(lengths: Sequence[int], head_dims: Sequence[int] = (64, 128, 256)) -> list[Case]:
    """One for each row that the table can have."""
    kinds = [(*band, cap) for cap in (None, 50.0) for band in ((False, None), (True, None), (True, 512))]
    return tuning.cases(head_dims, kinds, lengths)


def config_cases() -> list[Case]:
    """What a row of the configurations' table serves: causal and full, softcap where the table's dim has it."""
    plain = [Case("tune", 4, 2048 // d, 2048 // d, 4096, d, causal) for d in (64, 128, 256) for causal in (True, False)]
    return [*plain, Case("tune", 4, 16, 8, 4096, 256, True, None, 50.0)]


def measure_kernels(args: argparse.Namespace) -> list[ranking.Measured]:
    from flash_inductor.bench import timing

    clock, found = timing.GpuClock(), []
    for case in kernel_cases(args.lengths, args.dims):
        for m in tuning.kernels(case, clock, args.rep, print_line):
            found.append(m)
            flops = case.flops[ranking.PARTS[m.kind]]
            text = ", ".join(f"{name} {flops / t / 1e9:.0f}" for name, t in sorted(m.ms.items(), key=lambda x: x[1]))
            print_line(f"{case!s:60}{m.kind}  TFLOP/s {text}")
    return found


def measure_configs(args: argparse.Namespace) -> dict[tuple[str, int], list[dict[Any, float]]]:
    """{(kernel, head dim): [{config: milliseconds} of each case]}."""
    from flash_inductor.bench import timing

    clock = timing.GpuClock()
    found: dict[tuple[str, int], list[dict[Any, float]]] = {}
    for case in config_cases():
        for kind, ms in tuning.tiles(case, clock, args.rep, print_line, tuning.offered):
            flops = SHARE[kind] * case.flops["forward"]
            ranked = sorted(ms.items(), key=lambda x: x[1])
            text = ", ".join(f"{tuple(config)} {flops / t / 1e9:.0f}" for config, t in ranked)
            print_line(f"{case!s:44}{kind:5} TFLOP/s {text}")
            found.setdefault((kind, case.head_dim), []).append(ms)
    return found


def print_line(text: str) -> None:
    print(text, flush=True)


def config_table(found: dict[tuple[str, int], list[dict[Any, float]]]) -> str:
    """As it stands in the source of kernels/configs.py."""
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        lines.append(f'    "{kind}": {{')
        for (other, dim), cases in found.items():
            if other == kind:
                entries = ", ".join(f"Config{tuple(config)}" for config in ordered(cases))
                lines.append(f"        {dim}: ({entries},),")
        lines.append("    },")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "configs"))
    parser.add_argument("--measured", type=Path, metavar="JSON", help="measure nothing, read a run of attention.py")
    parser.add_argument(
        "--architecture", type=int, default=9, help="first digit of its compute capability (%(default)s)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N", help="of `kernels`")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], metavar="D", help="of `kernels`")
    parser.add_argument(
        "--rep", type=float, default=20.0, metavar="MS", help="measurement for each number (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write what was measured there, as JSON")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if args.measured is None:
        import torch

        args.architecture = torch.cuda.get_device_capability()[0]
    data: Any
    if args.what == "configs":
        by_config = measure_configs(args)
        print("\n" + config_table(by_config))
        data = [
            {"kind": kind, "head_dim": dim, "ms": [{str(tuple(c)): t for c, t in ms.items()} for ms in cases]}
            for (kind, dim), cases in by_config.items()
        ]
    else:
        read = args.measured and ranking.from_cells(json.loads(args.measured.read_text())["cells"])
        measured = read if read is not None else measure_kernels(args)
        print("\n" + "\n".join(map(ranking.row_text, ranking.rows(measured, args.architecture))))
        data = [m._asdict() for m in measured]
    if args.out is not None:
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
