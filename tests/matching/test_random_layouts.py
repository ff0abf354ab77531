"""Random index structures and random in-place writes: whatever is replaced must compute what eager computes."""

from __future__ import annotations

import random

import pytest
import torch
from site_helpers import compile_and_compare

SIZES = {"a": 2, "b": 3, "c": 2, "i": 5, "j": 4, "d": 8, "e": 6}


def shuffled(rng: random.Random, letters: str) -> str:
    return "".join(rng.sample(letters, len(letters)))


def random_case(seed: int):
    """(einsum of the scores, einsum of the values, masked, broadcast dims of the inputs)."""
    rng = random.Random(seed)
    lead = shuffled(rng, "abc"[: rng.randint(0, 3)])
    # the query has all leading dims or lacks one; key and value lack some, often the same
    q_lead = lead if rng.random() < 0.8 or not lead else lead[1:]
    k_lead = "".join(x for x in lead if rng.random() < 0.7 or x not in q_lead)
    v_lead = k_lead if rng.random() < 0.7 else "".join(x for x in lead if rng.random() < 0.7)
    first = f"{shuffled(rng, q_lead + 'id')},{shuffled(rng, k_lead + 'jd')}->{lead}ij"
    p = lead + "ij"
    second = f"{p},{shuffled(rng, v_lead + 'je')}->{shuffled(rng, lead + 'ie')}"
    return first, second, rng.random() < 0.5, rng


@pytest.mark.parametrize("seed", range(40))
def test_random_einsums(seed: int) -> None:
    first, second, masked, rng = random_case(seed)
    (q_term, k_term), v_term = first.split("->")[0].split(","), second.split("->")[0].split(",")[1]
    generator = torch.Generator().manual_seed(seed)

    def make(term: str) -> torch.Tensor:
        sizes = [1 if ch in "abc" and rng.random() < 0.15 else SIZES[ch] for ch in term]
        return torch.randn(sizes, generator=generator).requires_grad_()

    q, k, v = make(q_term), make(k_term), make(v_term)

    def fn(q, k, v):
        s = torch.einsum(first, q, k) * 0.3
        if masked:
            s = s.masked_fill(torch.ones(5, 4, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum(second, s.softmax(-1), v)

    backend = compile_and_compare(fn, (q, k, v))
    assert len(backend.sites) == 1


WRITES = {
    "add": lambda x: x.add_(0.5),
    "scale": lambda x: x.mul_(1.5),
    "scale_operator": lambda x: x.__imul__(0.5),
    "row": lambda x: x[..., 0].fill_(0.25),
    "setitem": lambda x: x.__setitem__((Ellipsis, 0), 0.25),
    "view": lambda x: x.view(-1).mul_(0.5),
    "mask": lambda x: x.masked_fill_(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), float("-inf")),
}


@pytest.mark.parametrize("seed", range(60))
def test_random_writes(seed: int) -> None:
    """One or two in-place writes at random places, to random tensors and views."""
    rng = random.Random(seed)
    plan = {rng.randrange(7): (rng.choice(list(WRITES)), rng.random()) for _ in range(rng.choice((1, 1, 2)))}
    extra = rng.random() < 0.2

    def fn(q, k, v):
        seen: dict[str, torch.Tensor] = {"q": q + 0, "k": k + 0, "v": v + 0}

        def step(place: int, **made: torch.Tensor) -> None:
            seen.update(made)
            if place in plan:
                write, which = plan[place]
                fit = {"mask": ["s", "t", "u"], "view": ["q", "k", "v", "s", "t", "u", "p", "y"]}.get(write, list(seen))
                names = [n for n in fit if n in seen] or ["q"]
                write = "add" if names == ["q"] else write
                WRITES[write](seen[names[int(which * len(names))]])

        step(0, qs=seen["q"] * 0.5, kt=seen["k"].mT)
        step(1, s=seen["qs"] @ seen["kt"])
        step(2, t=seen["s"] * 0.5)
        step(3, u=seen["t"] + torch.full((6, 6), float("-inf")).triu(1))
        step(4, p=seen["u"].softmax(-1))
        step(5, y=seen["p"] @ seen["v"])
        step(6)
        return (seen["y"], seen["q"], seen["k"], seen["v"], *([seen["t"]] if extra else []))

    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, 6, 8, generator=generator) for _ in range(3))
    backend = compile_and_compare(fn, (q, k, v))
    assert len(backend.sites) == 1
