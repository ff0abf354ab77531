"""Random masks made of padding, segment ids, opaque masks, biases and bands, in random ways, against eager.

In float64, so that nothing hides behind rounding.  What the matcher makes of each isn't looked at, only outputs and
gradients, of all rows that see something, whatever is read where, negated, sliced, written in place or chosen between.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from site_helpers import Rewriter, qkv, run

B, H, N, D = 2, 4, 6, 8
VERY = [-1e9, -1e5, -3e38]
Fn = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def inputs(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, N + 1, (B,), generator=g)
    return {
        "pad": (torch.arange(N) < lengths[:, None]).long(),
        "left": (torch.arange(N) >= N - lengths[:, None]).bool(),
        "fat": torch.rand(B, 1, N, N, generator=g) > 0.3,
        "heads": torch.rand(1, H, 1, N, generator=g) > 0.2,
        "wide": torch.rand(B, 2 * N, generator=g) > 0.3,
        "ids": torch.randint(0, 3, (B, N), generator=g, dtype=torch.int32),
        "long_ids": torch.randint(0, 2, (B, N), generator=g),
        "pos": torch.cat([torch.arange(2), torch.arange(N - 2)]).expand(B, N).contiguous(),
        "bias": torch.randn(1, H, N, N, generator=g, dtype=torch.float64),
        "slopes": torch.randn(H, 1, 1, generator=g, dtype=torch.float64),
        "row": torch.randn(B, 1, N, 1, generator=g, dtype=torch.float64),
    }


class Maker:
    """Builds random functions of the inputs; each call of one builds its tensors anew."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def leaf(self) -> Fn:
        i, j = (lambda: torch.arange(N)[:, None]), (lambda: torch.arange(N)[None, :])
        shift = self.r.randint(-1, 2)
        start = self.r.randint(0, N)
        bi = lambda: torch.arange(B)[:, None, None, None]  # noqa: E731
        choices: list[Fn] = [
            lambda x: j() <= i() + shift,
            lambda x: j() > i() - 2 - shift,
            lambda x: x["pad"].bool()[:, None, None, :],
            lambda x: x["pad"][:, None, None, :] != 0,
            lambda x: ~(x["pad"][:, None, None, :] == 0),
            lambda x: x["left"].view(B, 1, 1, N).expand(B, 1, N, N),
            lambda x: x["left"][bi(), j()[None, None]],
            lambda x: x["left"][bi(), i()[None, None]] | torch.zeros(N, dtype=torch.bool),
            lambda x: x["fat"],
            lambda x: x["fat"].transpose(-1, -2),
            lambda x: x["heads"],
            lambda x: x["wide"][:, None, None, start : start + N],
            lambda x: x["wide"][:, None, None, ::2],
            lambda x: x["wide"][:, start : start + N].flip(1)[:, None, None],
            lambda x: x["ids"][:, None, :, None] == x["ids"][:, None, None, :],
            lambda x: x["long_ids"][:, None, :, None] == x["long_ids"][:, None, None, :],
            lambda x: x["ids"][:, None, :, None] == x["ids"][:, None, None, :] + shift,
            lambda x: ~(x["ids"][bi(), i()[None, None]] != x["ids"].flip(1)[bi(), j()[None, None]]),
            lambda x: (x["long_ids"] == 1).cumsum(-1)[bi(), i()] == (x["long_ids"] == 1).cumsum(-1)[bi(), j()],
            lambda x: i() // 2 == j() // 2,
            lambda x: x["pos"][bi(), j()] <= x["pos"][bi(), i()] + shift,
            lambda x: self.segments(x)[bi(), i()] == self.segments(x)[bi(), j()],
            lambda x: (
                (x["pos"][bi(), j()] <= x["pos"][bi(), i()])
                & (self.segments(x)[bi(), i()] == self.segments(x)[bi(), j()])
            ),
        ]
        return self.r.choice(choices)

    @staticmethod
    def segments(x: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.diff(x["pos"], prepend=x["pos"][:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def boolean(self, depth: int) -> Fn:
        if depth == 0:
            return self.leaf()
        a, b = self.boolean(depth - 1), self.boolean(self.r.randint(0, depth - 1))
        choices: list[Fn] = [
            lambda x: a(x) & b(x),
            lambda x: a(x) & b(x),
            lambda x: torch.logical_and(a(x), b(x)).expand(B, -1 if _rank(a(x) & b(x)) == 4 else 1, N, N),
            lambda x: ~(~a(x) | ~b(x)),
            lambda x: a(x) | b(x),
            lambda x: ~a(x),
            lambda x: torch.where(b(x), a(x), False),
            lambda x: (a(x).float() * b(x).float()).bool(),
            lambda x: _written(a(x), b(x)),
        ]
        return self.r.choice(choices)

    def additive(self, depth: int) -> Fn:
        very, mild = self.r.choice(VERY), self.r.choice([-1.0, 0.5, 2.0])
        p = self.boolean(self.r.randint(0, 2))
        if depth == 0:
            return self.r.choice(
                [
                    lambda x: torch.where(p(x), 0.0, very).double(),
                    lambda x: torch.where(p(x), torch.zeros(()), torch.tensor(very)).double(),
                    lambda x: torch.zeros(p(x).shape, dtype=torch.float64).masked_fill(~p(x), very),
                    lambda x: torch.zeros(p(x).shape, dtype=torch.float64).masked_fill_(~p(x), very),
                    lambda x: (1.0 - p(x).double()) * very,
                    lambda x: (1 - x["pad"][:, None, None].double()) * very,
                    lambda x: torch.where(p(x), 0.0, mild).double(),
                    lambda x: x["bias"],
                    lambda x: x["bias"].detach(),
                    lambda x: x["slopes"] * torch.arange(N),
                    lambda x: x["row"],
                    lambda x: _no_grad(x["bias"]),
                ]
            )
        a, b = self.additive(depth - 1), self.additive(self.r.randint(0, depth - 1))
        choices: list[Fn] = [
            lambda x: a(x) + b(x),
            lambda x: a(x) + b(x),
            lambda x: a(x) * 0.5,
            lambda x: a(x) / 2,
            lambda x: a(x) - b(x).clamp(min=-1e3),
            lambda x: torch.where(p(x), a(x), very),
            lambda x: a(x).masked_fill(p(x), very),
            lambda x: torch.where(p(x), very, a(x) + b(x)),
            lambda x: torch.where(p(x), a(x), b(x)),
            lambda x: a(x).clone().add_(0.25),
            lambda x: a(x).float().double(),
        ]
        return self.r.choice(choices)


def _rank(x: torch.Tensor) -> int:
    return x.dim()


def _no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x[:, :, :, :] * 1.0


def _written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    both = (a & b).clone()
    kept = both & a
    both.logical_not_()
    return kept | (both & False)


def _shown(out: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Rows that see something: what the others get differs by form, and is documented."""
    rows = (added.detach().expand(B, H, N, N) > -5e3).any(-1, keepdim=True)
    return torch.where(rows, out, 0.0)


def attention(seed: int) -> Callable[..., torch.Tensor]:
    maker = Maker(seed)
    form = maker.r.randint(0, 4)
    p, a = maker.boolean(maker.r.randint(0, 3)), maker.additive(maker.r.randint(0, 3))
    scale = maker.r.choice([1.0, 0.5, 0.25])

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: dict[str, torch.Tensor]) -> torch.Tensor:
        if form == 0:
            m = p(x)
            return _shown(F.scaled_dot_product_attention(q, k, v, attn_mask=m), torch.where(m, 0.0, -1e9))
        if form == 1:
            m = a(x)
            return _shown(F.scaled_dot_product_attention(q, k, v, attn_mask=m), m)
        if form == 2:
            m = p(x)
            s = (q @ k.mT * 0.5).masked_fill(~m, -1e9)
            return _shown(torch.softmax(s, -1) @ v, torch.where(m, 0.0, -1e9))
        if form == 3:
            m = a(x) + torch.zeros(N)
            return _shown(torch.softmax((q @ k.mT + m) * scale, -1) @ v, m * scale)
        m, n = a(x), p(x)
        s = torch.where(n, q @ k.mT * 0.5, torch.tensor(-1e9)) + m
        return _shown(torch.softmax(s, -1) @ v, torch.where(n, 0.0, -1e9) + m)

    return fn


def check(seed: int) -> Rewriter:
    x = inputs(seed)
    learned = ("bias", "slopes")  # the gradient of "row", a number for each query, is zero but for rounding
    fn, names = attention(seed), list(x)

    def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return fn(q, k, v, dict(zip(names, rest, strict=True)))

    arguments = [t.requires_grad_() if n in learned else t for n, t in x.items()]
    arguments = [*qkv(H, q_len=N, dim=D, batch=B, dtype=torch.float64), *arguments]
    torch._dynamo.reset()
    backend = Rewriter()
    actual, expected = run(torch.compile(flat, backend=backend), arguments), run(flat, arguments)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)  # numbers up to some hundreds
    return backend


@pytest.mark.parametrize("seed", range(24))
def test_is_right(seed: int) -> None:
    backend = check(seed)
    assert len(backend.sites) == 1


def test_most_are_replaced() -> None:
    replaced = [check(seed).sites[0].replaced for seed in range(24, 36)]
    assert sum(replaced) > 9
