"""The parts of the matcher: products, and the value of a node in a graph that isn't functional."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_helpers import capture

from flash_inductor.matching import canonical, products
from flash_inductor.matching.program import Program, Refused, constant


def find(gm: torch.fx.GraphModule, op: str) -> torch.fx.Node:
    found = [n for n in gm.graph.nodes if (c := canonical.call(n)) is not None and c.op == op]
    return found[-1]


# --- products


@pytest.mark.parametrize(
    ("equation", "left", "right", "out"),
    [
        ("bhid,bhjd->bhij", "bhid", "bhjd", "bhij"),
        (" b q h d , b k h d -> b h q k ", "bqhd", "bkhd", "bhqk"),
        ("ij,kj", "ij", "kj", "ik"),
    ],
)
def test_einsum_labels(equation: str, left: str, right: str, out: str) -> None:
    rank = len(left)
    x = torch.randn(*(4,) * rank)
    product = products.parse(
        canonical.call(find(capture(lambda a, b: torch.einsum(equation, a, b), x, x + 1), "einsum"))
    )
    assert ("".join(product.left.labels), "".join(product.right.labels), "".join(product.out)) == (left, right, out)


def test_einsum_with_ellipsis_and_broadcast() -> None:
    gm = capture(lambda a, b: torch.einsum("...id,...jd->...ij", a, b), torch.randn(2, 3, 4, 5), torch.randn(1, 6, 5))
    product = products.parse(canonical.call(find(gm, "einsum")))
    assert product.left.labels[:2] == product.out[:2] and product.right.labels[0] is None


@pytest.mark.parametrize("equation", ["ii,ij->ij", "ij,jk,kl->il"])
def test_einsum_that_is_no_product_is_refused(equation: str) -> None:
    x = torch.randn(3, 3)
    args = [x] * (equation.count(",") + 1)
    with pytest.raises(Refused):
        products.parse(canonical.call(find(capture(lambda *a: torch.einsum(equation, *a), *args), "einsum")))


# --- values in a graph that isn't functional


def test_value_follows_writes_through_other_names() -> None:
    def fn(x):
        y = x + 1
        z = y.mul_(2)
        y.sub_(3)
        return z.relu()

    gm = capture(fn, torch.randn(3))
    program = Program(gm.graph)
    relu = next(n for n in gm.graph.nodes if n.target == "relu")
    c = program.value(relu.args[0], relu)
    assert c is not None and c.op == "sub" and c.inplace


def test_value_of_a_view_of_written_memory_is_unknown() -> None:
    def fn(x):
        y = x + 1
        z = y.view(-1)
        y.mul_(2)
        return z.relu()

    gm = capture(fn, torch.randn(2, 2))
    relu = next(n for n in gm.graph.nodes if n.target == "relu")
    assert Program(gm.graph).value(relu.args[0], relu) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.tensor(4.0).sqrt(), 2.0),
        (lambda: torch.full((), 0.1), float(torch.tensor(0.1))),
        (lambda: torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))),
        (lambda: torch.tensor(1e9).to(torch.float16), float("inf")),
        (lambda: torch.ones(()) * 3 / 2, 1.5),
        (lambda: torch.tensor(4.0).fill_(2.0), 2.0),
        (lambda: torch.rand(()), None),
        (lambda: torch.ones(3), None),
    ],
)
def test_constant_tensors(make: Any, expected: float | None) -> None:
    gm = capture(lambda x: x * make(), torch.randn(3))
    node = find(gm, "mul")
    other = canonical.call(node)["other"]
    assert constant(Program(gm.graph), other, node) == expected
