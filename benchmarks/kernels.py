"""Times our eager op beside SDPA (flash, cuDNN) and compiled FlexAttention, forward and backward, in one run.

    python benchmarks/kernels.py --out kernels.json            # the table; ratio = ours / best of the others
    python benchmarks/kernels.py --configs --out configs.json  # every config of the tuning table, kernel by kernel

Medians of CUDA event times, random bfloat16 inputs.  TFLOP/s count visible pairs only: 4 * B * H * pairs * D forward,
2.5 times that backward.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flash_inductor  # noqa: F401 - registers the op
from flash_inductor.kernels.configs import Kind, configs
from flash_inductor.ops import choice, cuda

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool
    window: int | None = None
    softcap: float | None = None

    @property
    def flops(self) -> float:
        """Of the forward, bottom and top alignment being the same for equal lengths."""
        i = torch.arange(self.length, dtype=torch.float64)
        last = i if self.causal else (i + (self.window or self.length)).clamp(max=self.length - 1)
        first = (i - (self.length if self.window is None else self.window)).clamp(min=0)
        return 4.0 * self.batch * self.heads * self.head_dim * (last - first + 1).sum().item()

    @property
    def options(self) -> dict[str, Any]:
        right = self.window if not self.causal else None
        return {"is_causal": self.causal, "window_left": self.window, "window_right": right, "softcap": self.softcap}

    def inputs(self) -> list[Tensor]:
        shape = (self.length, self.head_dim)
        sizes = [(self.batch, h, *shape) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in sizes]  # query, key, value, grad_out

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        window = "" if self.window is None else f" window {self.window}"
        cap = "" if self.softcap is None else f" softcap {self.softcap:g}"
        return f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.length} D{self.head_dim} {kind}{window}{cap}"


CASES = [
    Case(4, 16, 16, 4096, 128, False),
    Case(4, 16, 16, 4096, 128, True),
    Case(1, 16, 16, 16384, 128, True),
    Case(4, 32, 32, 4096, 64, True),
    Case(4, 32, 32, 4096, 64, False),
    Case(4, 32, 8, 4096, 128, True),
    Case(4, 8, 8, 4096, 256, True),
    Case(16, 16, 16, 1024, 128, True),
    Case(1, 32, 8, 16384, 128, True, 1024),
    Case(4, 32, 8, 4096, 128, True, None, 50.0),
    Case(4, 16, 8, 4096, 256, True, None, 50.0),
    Case(2, 16, 8, 8192, 256, True, 4095, 50.0),
    Case(4, 32, 8, 4096, 64, True, 128),
    Case(4, 16, 16, 4096, 64, False, 64),
]
# One case for each row of the tuning table and each feature that changes its inner loop.
CONFIG_CASES = [
    *(Case(4, 2048 // d, 2048 // d, 4096, d, causal) for d in (64, 128, 256) for causal in (True, False)),
    Case(4, 16, 8, 4096, 256, True, None, 50.0),
]


def ours(case: Case) -> Attention:
    """What a matched site becomes: the op in a compiled graph, the table's choice of configuration."""
    return torch.compile(lambda q, k, v: torch.ops.flashbwd.attn(q, k, v, **case.options)[0], dynamic=False)


def sdpa(backend: SDPBackend) -> Callable[[Case], Attention | None]:
    def make(case: Case) -> Attention | None:
        if case.window is not None or case.softcap is not None:
            return None

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
                )

        return attention

    return make


def flex(case: Case) -> Attention:
    n, window, cap = case.length, case.window, case.softcap

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if window is None:
            return i >= j
        return (i >= j) & (i - j <= window) if case.causal else (i - j).abs() <= window

    masked = case.causal or window is not None
    block_mask = create_block_mask(visible, None, None, n, n, device="cuda") if masked else None

    def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(
            q, k, v, block_mask=block_mask, score_mod=capped if cap else None, enable_gqa=case.heads != case.kv_heads
        )

    return torch.compile(attention, dynamic=False)


IMPLEMENTATIONS: dict[str, Callable[[Case], Attention | None]] = {
    "ours": ours,
    "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
}


def median_ms(call: Callable[[], Any], rep: int) -> float:
    return triton.testing.do_bench(call, warmup=20, rep=rep, return_mode="median")


def time_case(case: Case, make: Callable[[Case], Attention | None], rep: int) -> dict[str, Any] | None:
    """{"forward": TFLOP/s, "backward": TFLOP/s}, {"error": text}, or None if the implementation can't do the case."""
    try:
        attention = make(case)
        if attention is None:
            return None
        *inputs, grad_out = case.inputs()
        for x in inputs:
            x.requires_grad_()
        out = attention(*inputs)
        with torch.no_grad():
            forward = median_ms(lambda: attention(*inputs), rep)
        backward = median_ms(lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True), rep)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:300]}
    return {"forward": case.flops / forward / 1e9, "backward": 2.5 * case.flops / backward / 1e9}


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    header = "".join(f"{name:>16}" for name in args.impls)
    print(f"{'TFLOP/s forward/backward':45}{header}{'ratio':>13}")
    for case in CASES:
        if args.only not in str(case):
            continue
        found = {name: time_case(case, IMPLEMENTATIONS[name], args.rep) for name in args.impls}
        ratios = {}
        for part in ("forward", "backward"):
            others = [r[part] for name, r in found.items() if name != "ours" and r and part in r]
            mine = found.get("ours") or {}
            ratios[part] = mine[part] / max(others) if others and part in mine else float("nan")
        cells = ["-" if r is None else "error" if "error" in r else f"{r['forward']:.0f}/{r['backward']:.0f}"
                 for r in found.values()]  # fmt: skip
        ratio = f"{ratios['forward']:.2f}/{ratios['backward']:.2f}"
        print(f"{case!s:45}" + "".join(f"{c:>16}" for c in cells) + f"{ratio:>13}", flush=True)
        for name, r in found.items():
            if r and "error" in r:
                print(f"    {name}: {r['error']}", flush=True)
        rows.append({"case": asdict(case), "name": str(case), "results": found, "ratio": ratios})
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


def config_calls(case: Case) -> Iterator[tuple[Kind, Any, float, Callable[[], Any]]]:
    """(kind, config, FLOP, call) for each config that the table offers for this case."""
    query, key, value, grad_out = case.inputs()
    capability, limit = choice.device_limits(query.device.index)
    out, lse = cuda.forward(query, key, value, **case.options)
    block = cuda.block_dim(case.head_dim)
    only: dict[Kind, tuple[bool, bool, bool]] = {"dq": (True, False, False), "dkdv": (False, True, True)}
    share: dict[Kind, float] = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # products of each kernel, in units of the forward

    def call(kind: Kind, config: Any) -> Callable[[], Any]:
        if kind == "fwd":
            return lambda: cuda.forward(query, key, value, **case.options, config=config)
        chosen = {f"{kind}_config": config, "grad_mask": only[kind]}
        return lambda: cuda.backward(grad_out, None, query, key, value, out, lse, **case.options, **chosen)

    for kind in share:
        for config in configs(kind, capability, block, block, query.element_size(), limit):
            yield kind, config, share[kind] * case.flops, call(kind, config)


def try_configs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of "dq" and "dkdv" include the delta reduction, the same for each config; rates count executed products."""
    rows = []
    for case in CONFIG_CASES:
        if args.only not in str(case):
            continue
        print(case)
        for kind, config, flops, call in config_calls(case):
            try:
                ms = median_ms(call, args.rep)
                row = {"ms": ms, "tflops": flops / ms / 1e9}
                text = f"{ms:8.3f} ms {row['tflops']:6.0f} TFLOP/s"
            except Exception as e:
                row = {"error": f"{type(e).__name__}: {e}"[:300]}
                text = row["error"]
            print(f"    {kind:5}{tuple(config)!s:20}{text}", flush=True)
            rows.append({"case": asdict(case), "name": str(case), "kind": kind, "config": list(config), **row})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true", help="time each config of the tuning table instead")
    parser.add_argument("--impls", type=lambda s: s.split(","), default=list(IMPLEMENTATIONS), help="comma-separated")
    parser.add_argument("--only", default="", help="only cases whose name contains this, e.g. 'D128 causal'")
    parser.add_argument("--rep", type=int, default=60, help="milliseconds of measurement for each number")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args(argv)
    if unknown := set(args.impls) - set(IMPLEMENTATIONS):
        parser.error(f"--impls: expected names of {list(IMPLEMENTATIONS)}, got {sorted(unknown)}")
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    rows = try_configs(args) if args.configs else compare(args)
    if args.out:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
        device = torch.cuda.get_device_name()
        args.out.write_text(json.dumps({"device": device, "versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
