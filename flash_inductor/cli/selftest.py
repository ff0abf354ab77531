"""What doctor runs: the op and a compiled model on a device, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.errors import in_one_line
from ..matching.install import enabled
from ..ops import choice
from ..report import collect
from ..spec import AttentionSpec, MaskSpec
from ..testing import assert_close_to_reference, make_inputs
from .checks import Check

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal window with softcap": {"is_causal": True, "window_left": 32, "softcap": 20.0},
}
REPORT = "please report this with the output of flash-inductor doctor --json"


def tests(device: str, compile_too: bool = True) -> Iterator[tuple[str, Callable[[], Check]]]:
    """(what is tested, the test) for each; a test never raises."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, options in CASES.items():
        for kernel in kernels(options, device, dtype):
            title = f"op, {name}" + (f", {kernel}" if kernel else "")
            yield title, _guarded(title, _op, options, kernel, device, dtype)
    if compile_too:
        title = "compiled model, forward and backward"
        yield title, _guarded(title, _model, device)


def kernels(options: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[str | None, ...]:
    """The kernels to test by name; (None,) where there is no choice."""
    if device != "cuda":
        return (None,)
    window = {key: value for key, value in options.items() if key != "softcap"}
    band, square = choice.classify(MaskSpec.from_window(**window), 192, 192, same_length=True)
    problem = choice.Problem(
        "fwd", choice.device_limits(0)[0], dtype, 64, 64, (192, 192), band, square, softcap="softcap" in options
    )
    return choice.eligible(problem)


def _guarded(title: str, test: Callable[..., str], *args: Any) -> Callable[[], Check]:
    def run() -> Check:
        try:
            return Check(title, "ok", test(*args))
        except Exception as error:
            return Check(title, "problem", in_one_line(error), REPORT)

    return run


def _op(options: dict[str, Any], kernel: str | None, device: str, dtype: torch.dtype) -> str:
    query, key, value = make_inputs(
        "bnhd", heads=4, kv_heads=2, q_len=192, head_dim=64, dtype=dtype, device=device, requires_grad=True
    )
    named = {} if kernel is None else {"kernel_name": kernel}
    out, lse = torch.ops.flashbwd.attn(query, key, value, **options, **named)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    window = {name: x for name, x in options.items() if name != "softcap"}
    spec = AttentionSpec(mask=MaskSpec.from_window(**window), softcap=options.get("softcap"))
    results = [x.detach() for x in (out, lse, *grads)]
    assert_close_to_reference(results, query.detach(), key.detach(), value.detach(), spec, grad_out=grad_out)
    return f"as near to float64 as eager attention ({str(dtype).removeprefix('torch.')})"


class Attention(nn.Module):
    """Causal attention as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = query @ key.transpose(-1, -2) / 4.0
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        probabilities = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (probabilities @ value).transpose(1, 2).flatten(2)


def _model(device: str) -> str:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 96, 64)
    torch.set_rng_state(state)
    exact = Attention().double()
    exact.load_state_dict(model.state_dict())
    model = model.to(device)
    with enabled(), collect() as sites:
        out = torch.compile(model)(x.to(device))
    out.square().sum().backward()
    wanted = exact(x.double())
    wanted.square().sum().backward()
    if not sites or not all(site.replaced for site in sites):
        raise RuntimeError(f"the attention was left alone: {sites[0].reason if sites else 'it was not found'}")
    pairs = [(out, wanted), *((p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True))]
    error = max(((a.cpu().double() - b).norm() / b.norm()).item() for a, b in pairs if a is not None and b is not None)
    bound = 1e-4 if device == "cpu" else 5e-3  # float32; products on a GPU may be of TensorFloat-32
    if not error <= bound:
        raise RuntimeError(f"relative error {error:.1e} against float64, expected at most {bound:.0e}")
    return f"replaced, relative error {error:.0e} against float64, runs as {sites[0].kernel}"
