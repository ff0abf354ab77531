"""What the package costs besides kernels: host time of a compiled call, and its passes' share of torch.compile's time.

    python benchmarks/overhead.py calls --out calls.json       one GPU: host time of a call, ours beside stock SDPA
    python benchmarks/overhead.py compile --out compile.json   a 12-layer model, GPU or CPU; --profile says what is slow

Calls use sizes so small that the GPU always waits for the host: the time of many calls in a row, on the CPU's clock, is
then what launching costs.  ``--gate`` fails where ours takes more than stock, or the passes more than 2 %.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_inductor
from flash_inductor.matching import fusion_pass
from flash_inductor.report import collect

Call = Callable[[], Any]
MOST_HOST_RATIO = 1.05  # of stock's host time: what repeated runs of one implementation differ by
MOST_SHARE = 0.02  # of torch.compile's time


# --- host time of calls


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_calls(impl: str, length: int, dim: int, device: str) -> dict[str, Call]:
    """{"inference": ..., "forward": ..., "both": ...} of one implementation; "both" is forward and backward."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [torch.randn(1, length, 4, dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)]
    *qkv, grad_out = inputs
    with flash_inductor.enabled() if impl.startswith("ours") else nullcontext(), collect() as sites:
        # A code object of its own: Dynamo would find what it compiled of the same one with the switch the other way.
        function = FunctionType(sdpa.__code__.replace(co_name=f"sdpa_{impl}"), sdpa.__globals__)
        attention = torch.compile(function, dynamic=False)
        wanted = [x.detach().requires_grad_() for x in qkv]

        def inference() -> Tensor:
            with torch.no_grad():
                return attention(*qkv)

        def forward() -> Tensor:
            return attention(*wanted)

        def both() -> Any:
            return torch.autograd.grad(attention(*wanted), wanted, grad_out)

        calls: dict[str, Call] = {"inference": inference, "forward": forward, "both": both}
        for call in calls.values():
            for _ in range(3):
                call()
    if impl.startswith("ours") and not (sites and all(site.replaced for site in sites)):
        raise RuntimeError(f"expected the plugin to replace the site, got {[site.describe() for site in sites]}")
    return calls


def host_us(call: Call, count: int, device: str) -> tuple[float, bool]:
    """Microseconds of host time for a call, and whether the GPU kept up: had nothing left to do soon after the last."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    end = time.perf_counter()
    if device == "cuda":
        torch.cuda.synchronize()
    behind = time.perf_counter() - end
    return 1e6 * (end - begin) / count, behind < 0.1 * (end - begin)


def measure_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(f"{'host microseconds a call':30}" + "".join(f"{name:>12}" for name in ("stock", "ours")) + f"{'ratio':>8}")
    for dim in args.dims:
        for length in args.lengths:
            torch.compiler.reset()
            made = {impl: make_calls(impl, length, dim, args.device) for impl in ("stock", "ours")}
            for what in ("inference", "forward", "both"):
                times: dict[str, list[float]] = {"stock": [], "ours": []}
                kept_up = True
                for i in range(args.rounds):
                    for impl in sorted(times, reverse=bool(i % 2)):
                        us, kept = host_us(made[impl][what], args.calls, args.device)
                        times[impl].append(us)
                        kept_up &= kept
                medians = {impl: statistics.median(found) for impl, found in times.items()}
                ratio = statistics.median(a / b for a, b in zip(times["ours"], times["stock"], strict=True))
                name = f"N{length} D{dim} {what}"
                note = "" if kept_up else "  the GPU fell behind: not host time"
                print(f"{name:30}{medians['stock']:12.1f}{medians['ours']:12.1f}{ratio:8.2f}{note}", flush=True)
                rows.append({"name": name, "us": medians, "ratio": ratio, "host_bound": kept_up})
    return rows


def calls_gate(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: {row['ratio']:.2f} times stock's host time"
        for row in rows
        if row["host_bound"] and row["ratio"] > MOST_HOST_RATIO
    ]


# --- share of compile time


class Block(nn.Module):
    """A decoder layer as models write it: grouped heads, rotary embedding, a mask made from positions."""

    def __init__(self, width: int, heads: int, kv_heads: int, eager: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.eager = heads, kv_heads, width // heads, eager
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, kv_heads * self.dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norms[0](x)
        q, k, v = (
            f(y).view(batch, length, heads, self.dim).transpose(1, 2)
            for f, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        k, v = (
            t[:, :, None].expand(-1, -1, self.heads // self.kv_heads, -1, -1).reshape(q.shape[:1] + q.shape[1:])
            for t in (k, v)
        )
        if self.eager:
            s = torch.matmul(q, k.transpose(2, 3)) * self.dim**-0.5
            s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
            a = torch.matmul(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)
        else:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, -1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Twelve layers by default, and a loss."""

    def __init__(self, layers: int = 12, width: int = 128, heads: int = 4, eager: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width, heads, heads // 2, eager) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        self.dim = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (at[None, :] <= at[:, None])[None, None]
        angles = at[:, None] / 10000 ** (torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, cos.to(x.dtype), sin.to(x.dtype))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def make_model(name: str, layers: int, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A training model and its inputs.  Names with "hf-" are Hugging Face's, and need transformers."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = torch.randint(0, 256, (2, 256), device=device)
    torch.manual_seed(0)
    if not name.startswith("hf-"):
        return Decoder(layers, eager=name == "eager").to(device, dtype), {"tokens": tokens}
    import transformers

    width: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config: Any = (
        transformers.LlamaConfig(**width, num_hidden_layers=layers, vocab_size=256)
        if name == "hf-llama"
        else transformers.GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=256)
    )
    config.use_cache = False
    config._attn_implementation = "eager" if name == "hf-gpt2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).train()
    return model, {"input_ids": tokens, "labels": tokens}


MODELS = ("sdpa", "eager", "hf-llama", "hf-gpt2")


@contextmanager
def timed_passes(profile: cProfile.Profile | None) -> Iterator[dict[str, float]]:
    """Seconds spent in each of the package's passes inside the block, by name."""
    seconds: dict[str, float] = {}
    originals = {kind: kind.__call__ for kind in (fusion_pass.FusionPass, fusion_pass.KeyPass)}

    def wrap(kind: Any) -> Any:
        def call(self: Any, graph: Any) -> None:
            begin = time.perf_counter()
            if profile is not None:
                profile.enable()
            try:
                originals[kind](self, graph)
            finally:
                if profile is not None:
                    profile.disable()
                seconds[kind.__name__] = seconds.get(kind.__name__, 0.0) + time.perf_counter() - begin

        return call

    for kind in originals:
        kind.__call__ = wrap(kind)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        for kind, original in originals.items():
            kind.__call__ = original  # type: ignore[method-assign]


def compile_once(name: str, args: argparse.Namespace, profile: cProfile.Profile | None = None) -> dict[str, Any]:
    """Compile a training step with the plugin on and its caches as they are: seconds in all, and in the passes."""
    model, inputs = make_model(name, args.layers, args.device)
    torch.compiler.reset()
    gc.collect()
    begin = time.perf_counter()
    with flash_inductor.enabled(), collect() as sites, timed_passes(profile) as passes:
        compiled = torch.compile(model, dynamic=False, backend=args.backend)
        result = compiled(**inputs)
        (result if isinstance(result, Tensor) else result.loss).backward()
        if args.device == "cuda":
            torch.cuda.synchronize()
        total = time.perf_counter() - begin
    replaced = sum(site.replaced for site in sites)
    return {"model": name, "layers": args.layers, "replaced": replaced, "seconds": total, "passes": passes,
            "share": sum(passes.values()) / total}  # fmt: skip


def measure_compile(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each model, the second compile: the first one imports and warms up what both need once in a process."""
    rows = []
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "0" if args.caches else "1"
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = not args.caches
    small = argparse.Namespace(**{**vars(args), "layers": 1})
    for name in args.models:
        compile_once(name, small)
        profile = cProfile.Profile() if args.profile else None
        if args.caches:
            compile_once(name, args)
        row = compile_once(name, args, profile)
        rows.append({**row, "caches": args.caches})
        parts = ", ".join(f"{part} {1e3 * s:.1f} ms" for part, s in row["passes"].items())
        print(f"{name:10} {row['layers']} layers, {row['replaced']} sites replaced: {row['seconds']:.1f} s, "
              f"of which {100 * row['share']:.2f} % in passes ({parts})", flush=True)  # fmt: skip
        if profile is not None and row["passes"]:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(args.profile)
    return rows


def compile_gate(rows: Sequence[dict[str, Any]]) -> list[str]:
    failures = [f"{row['model']}: passes take {100 * row['share']:.1f} %" for row in rows if row["share"] > MOST_SHARE]
    return failures + [f"{row['model']}: no site was replaced" for row in rows if not row["replaced"]]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--out", type=Path, help="write JSON here")
    shared.add_argument("--gate", action="store_true", help="exit 1 where a limit is passed")
    calls = parts.add_parser("calls", parents=[shared], help="host time of compiled calls")
    calls.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[256, 512, 1024])
    calls.add_argument("--dims", type=lambda s: [int(x) for x in s.split(",")], default=[64, 128])
    calls.add_argument("--calls", type=int, default=100, help="calls in a row (%(default)s)")
    calls.add_argument("--rounds", type=int, default=9)
    share = parts.add_parser("compile", parents=[shared], help="the passes' share of compile time")
    share.add_argument("--models", type=lambda s: s.split(","), default=["sdpa", "eager"], help=f"of {MODELS}")
    share.add_argument("--layers", type=int, default=12)
    share.add_argument("--backend", default="inductor")
    share.add_argument("--caches", action="store_true", help="with Inductor's caches, warm: the share is larger then")
    share.add_argument("--profile", type=int, default=0, metavar="LINES", help="the passes' profile by function")
    args = parser.parse_args(argv)
    if args.what == "compile" and (unknown := set(args.models) - set(MODELS)):
        parser.error(f"--models: expected some of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore")
    rows = measure_calls(args) if args.what == "calls" else measure_compile(args)
    failures = calls_gate(rows) if args.what == "calls" else compile_gate(rows)
    for text in failures:
        print(f"over the limit: {text}")
    if args.out is not None:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        command = " ".join(["python", "benchmarks/overhead.py", *argv])
        data = {"command": command, "device": device, "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if args.gate and failures else 0


if __name__ == "__main__":
    sys.exit(main())
