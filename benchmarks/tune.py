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
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from grid import ranking

from flash_inductor.bench.case import Case

Call = Callable[[], Any]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Products of each Triton kernel, in units of the forward's two.
SHARE = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}
SAME = 2e-2  # relative difference of two right results


def kernel_cases(lengths: Sequence[int]) -> list[Case]:
    """One for each row that the table can have."""
    kinds: list[tuple[bool, int | None, float | None]] = [
        (False, None, None),
        (True, None, None),
        (True, 512, None),
        (True, None, 50.0),
        (True, 512, 50.0),
    ]
    return [
        Case("tune", max(1, 16384 // n), 2048 // d, 2048 // d, n, d, causal, window, cap, layout="bnhd")
        for d in (64, 128, 256)
        for causal, window, cap in kinds
        for n in lengths
        if window is None or n > window
    ]


def config_cases() -> list[Case]:
    """What a row of the configurations' table serves: causal and full, softcap where the table's dim has it."""
    plain = [Case("tune", 4, 2048 // d, 2048 // d, 4096, d, causal) for d in (64, 128, 256) for causal in (True, False)]
    return [*plain, Case("tune", 4, 16, 8, 4096, 256, True, None, 50.0)]


def times(calls: dict[str, Call], args: argparse.Namespace, clock: Any) -> dict[str, float]:
    """Milliseconds of each call that doesn't refuse or fail; those that do are printed."""
    import statistics

    from flash_inductor.bench.timing import interleave

    able = {}
    for name, call in calls.items():
        try:
            call()
            able[name] = call
        except NotImplementedError:
            pass
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
    return {name: statistics.median(ms) for name, ms in interleave(able, clock, 3, args.rep).items()}


def measure_kernels(args: argparse.Namespace) -> list[ranking.Measured]:
    import torch

    from flash_inductor.bench import impls, timing
    from flash_inductor.kernels.choices import KERNELS

    clock, found = timing.GpuClock(), []
    attn, attn_backward = torch.ops.flashbwd.attn, torch.ops.flashbwd.attn_backward
    for case in kernel_cases(args.lengths):
        query, key, value, grad_out = impls.inputs(case, "cuda")
        out, lse = attn(query, key, value, **case.options, kernel_name="triton")

        def forward(kernel: str, case: Case = case, inputs: Any = (query, key, value)) -> Call:
            return lambda: attn(*inputs, **case.options, kernel_name=kernel)

        def backward(
            kernel: str, case: Case = case, saved: Any = (grad_out, None, query, key, value, out, lse)
        ) -> Call:
            return lambda: attn_backward(*saved, **case.options, kernel_name=kernel)

        for kind, make in (("fwd", forward), ("bwd", backward)):
            ms = times({kernel: make(kernel) for kernel in KERNELS}, args, clock)
            band = "window" if case.window else "causal" if case.causal else "full"
            found.append(ranking.Measured(kind, case.head_dim, band, case.softcap is not None, case.length, ms))
            flops = case.flops[ranking.PARTS[kind]]
            text = ", ".join(f"{name} {flops / t / 1e9:.0f}" for name, t in sorted(ms.items(), key=lambda x: x[1]))
            print(f"{case!s:60}{kind}  TFLOP/s {text}", flush=True)
    return found


def config_calls(case: Case) -> Iterator[tuple[str, dict[Any, Call]]]:
    """(kernel, {config: call}) for what the table offers for a case."""
    from flash_inductor.bench import impls
    from flash_inductor.kernels.configs import configs
    from flash_inductor.ops import choice, triton_kernels

    query, key, value, grad_out = impls.inputs(case, "cuda")
    capability, limit = choice.device_limits(query.device.index)
    out, lse = triton_kernels.forward(query, key, value, **case.options)
    block = triton_kernels.block_dim(case.head_dim)
    wanted = {"dq": (True, False, False, False), "dkdv": (False, True, True, False)}

    def call(kind: str, config: Any) -> Call:
        if kind == "fwd":
            return lambda: triton_kernels.forward(query, key, value, **case.options, config=config)
        options: dict[str, Any] = {f"{kind}_config": config, "grad_mask": wanted[kind], **case.options}
        return lambda: triton_kernels.backward(grad_out, None, query, key, value, out, lse, **options)

    for kind in SHARE:
        offered = configs(kind, capability, block, block, query.element_size(), limit)  # type: ignore[arg-type]
        yield kind, {config: call(kind, config) for config in offered}


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True) if y.numel()]
    return all(bool((x - y).norm() <= SAME * y.norm()) for x, y in pairs)


def measure_configs(args: argparse.Namespace) -> dict[tuple[str, int], list[dict[Any, float]]]:
    """{(kernel, head dim): [{config: milliseconds} of each case]}."""
    from flash_inductor.bench import timing

    clock = timing.GpuClock()
    found: dict[tuple[str, int], list[dict[Any, float]]] = {}
    for case in config_cases():
        for kind, calls in config_calls(case):
            expected, right = next(iter(calls.values()))(), {}
            for config, call in calls.items():
                try:
                    if same(call(), expected):
                        right[str(tuple(config))] = call
                    else:
                        print(f"    {kind} {tuple(config)}: other results than the first", flush=True)
                except Exception as error:
                    print(f"    {kind} {tuple(config)}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            ms = times(right, args, clock)
            flops = SHARE[kind] * case.flops["forward"]
            text = ", ".join(f"{name} {flops / t / 1e9:.0f}" for name, t in sorted(ms.items(), key=lambda x: x[1]))
            print(f"{case!s:44}{kind:5} TFLOP/s {text}", flush=True)
            found.setdefault((kind, case.head_dim), []).append(
                {c: ms[str(tuple(c))] for c in calls if str(tuple(c)) in ms}
            )
    return found


def ordered(cases: Sequence[dict[Any, float]]) -> list[Any]:
    """Configurations by the geometric mean over the cases of time over the case's best; those that failed once last."""

    def cost(config: Any) -> float:
        if not all(config in ms for ms in cases):
            return math.inf
        return sum(math.log(ms[config] / min(ms.values())) for ms in cases)

    return sorted(dict.fromkeys(c for ms in cases for c in ms), key=cost)


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
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=list(LENGTHS))
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
