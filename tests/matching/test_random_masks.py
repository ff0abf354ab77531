"""Random compositions of mask operations, as ATen graphs with symbolic sizes: refused, or exactly what was proved."""

from __future__ import annotations

import operator

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from flash_inductor.matching.masks import MaskProof, prove

INF = float("inf")
PROOFS: list[bool] = []
COMPARE = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]


def indices(draw, n, m):
    """An integer tensor over rows, columns or both."""
    start = draw(st.integers(-3, 3))
    row, column = torch.arange(start, n + start)[:, None], torch.arange(m)[None]
    shift, skip = draw(st.integers(-3, 3)), draw(st.integers(0, 2))
    makers = [
        lambda: row,
        lambda: column,
        lambda: row - column,
        lambda: column - row + shift,
        lambda: row + (m - n),
        lambda: -row,
        lambda: 2 * row - column,
        lambda: (row - column).abs(),
        lambda: torch.arange(n + 2)[skip:][:n, None],
        lambda: row // 2,
    ]
    return makers[draw(st.integers(0, len(makers) - 1))]()


def bools(draw, n, m, depth):
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        kind = draw(st.integers(0, 3))
        if kind == 0:
            return torch.ones(n, m, dtype=torch.bool)
        if kind == 1:
            return torch.ones(n, m, dtype=torch.bool).tril(draw(st.integers(-2, 3)))
        right = indices(draw, n, m) if draw(st.booleans()) else draw(st.integers(-3, 6))
        return draw(st.sampled_from(COMPARE))(indices(draw, n, m), right).expand(n, m)
    choice = draw(st.integers(0, 8))
    x = bools(draw, n, m, depth - 1)
    if choice == 0:
        return ~x
    if choice == 1:
        return x.tril(draw(st.integers(-2, 3)))
    if choice == 2:
        return torch.triu(x, draw(st.integers(-3, 2)))
    if choice == 3:
        return x[None].expand(2, n, m)[draw(st.integers(-2, 1))]
    if choice == 4:
        copy = x.clone()
        copy.masked_fill_(bools(draw, n, m, depth - 1), draw(st.booleans()))
        return copy
    if choice == 5:
        return additive(draw, n, m, depth - 1) == 0
    if choice == 6:
        return x & bools(draw, n, m, depth - 1)
    if choice == 7:
        return x | bools(draw, n, m, depth - 1)
    return x ^ bools(draw, n, m, depth - 1)


def additive(draw, n, m, depth):
    low = draw(st.sampled_from([-INF, torch.finfo(torch.float32).min, -1e9, -1.0]))
    x = bools(draw, n, m, depth)
    choice = draw(st.integers(0, 3))
    if choice == 0:
        return torch.where(x, 0.0, low)
    if choice == 1:
        return torch.zeros(n, m).masked_fill(x, low)
    if choice == 2:
        return (1.0 - x.float()) * -1e5
    return torch.zeros(n, m).masked_fill(x, low) + torch.where(bools(draw, n, m, depth), 0.0, low)


def at(bound, symbols, n, m):
    if bound is None or isinstance(bound, int):
        return bound
    return int(bound.node.expr.subs({symbols[0]: n, symbols[1]: m}))


class Replay:
    """Records the choices of the first run, so that the same mask is made at other sizes."""

    def __init__(self, draw):
        self.draw, self.log, self.position = draw, [], None

    def __call__(self, strategy):
        if self.position is None:
            self.log.append(self.draw(strategy))
            return self.log[-1]
        self.position += 1
        return self.log[self.position - 1]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_refused_or_exact(data):
    draw = Replay(data.draw)
    is_float = data.draw(st.booleans())
    kind = "additive" if is_float else data.draw(st.sampled_from(["keep", "drop"]))
    make = additive if is_float else bools
    depth = data.draw(st.integers(0, 2))

    def fn(scores):
        n, m = scores.shape
        return make(draw, n, m, depth)

    graph = make_fx(fn, tracing_mode="symbolic")(torch.zeros(6, 9)).graph
    (output,) = graph.find_nodes(op="output")
    n, m = graph.find_nodes(op="placeholder")[0].meta["val"].shape
    proof = prove(output.args[0], kind, n, m, output)
    PROOFS.append(isinstance(proof, MaskProof))
    if not isinstance(proof, MaskProof):
        return
    symbols = n.node.expr, m.node.expr
    for rows, columns in ((6, 9), (5, 5), (7, 4), (4, 11)):
        draw.position = 0
        value = make(draw, rows, columns, depth)
        keep = value == 0 if kind == "additive" else value if kind == "keep" else ~value
        if kind == "additive":
            assert bool((keep | (value <= -1e4)).all())
        lower, upper = (at(b, symbols, rows, columns) for b in (proof.mask.lower, proof.mask.upper))
        distance = torch.arange(columns)[None] - torch.arange(rows)[:, None]
        band = torch.ones(rows, columns, dtype=torch.bool)
        band &= distance >= lower if lower is not None else True
        band &= distance <= upper if upper is not None else True
        assert torch.equal(keep, band), (proof, graph)
        if not proof.empty_rows:
            assert bool(keep.any(-1).all()), (proof, graph)


def test_some_random_masks_are_proved():
    assert sum(PROOFS) > 4, f"{sum(PROOFS)} of {len(PROOFS)} random masks were proved"
