"""The optional tensors of the op, each alone, in every broadcast form, and together."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 21, "kv_len": 18}
FULL = (SIZES["batch"], SIZES["heads"], SIZES["q_len"], SIZES["kv_len"])
FORMS = ["".join(form) for form in itertools.product("1n", repeat=4)]
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 4, "window_right": 5, "diagonal": 3, "softcap": 1.5},
}


def rand(form: str, seed: int = 0, full: tuple[int, ...] = FULL) -> Tensor:
    """Random numbers whose dims are 1 where ``form`` says so."""
    shape = [1 if c == "1" else n for c, n in zip(form, full, strict=True)]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def segments(seed: int, length: int, batch: int = 2, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (batch, length), generator=generator, dtype=torch.int32)


def packed(length: int, document: int) -> Tensor:
    return (torch.arange(length) // document).int().unsqueeze(0)


def padding(lengths: list[int], kv_len: int, left: bool = False) -> Tensor:
    mask = torch.arange(kv_len) < torch.tensor(lengths).unsqueeze(1)
    return (mask.flip(1) if left else mask)[:, None, None, :]


def _infinite_bias() -> Tensor:
    bias = rand("nn1n")
    bias[0, :, :, 5:] = -torch.inf
    bias[1] = -torch.inf  # a batch entry that sees nothing
    return bias


def _cases() -> dict[str, dict[str, Any]]:
    q_len, kv_len = FULL[2:]
    rng = torch.tensor([2**62 + 12345, 2**33 + 7])
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    documents = {"query_segments": packed(q_len, 5), "key_segments": packed(kv_len, 5)}
    scattered = {"query_segments": segments(1, q_len), "key_segments": segments(2, kv_len)}
    dropout = {"dropout_p": 0.3, "rng_state": rng}
    return {
        **{f"bias {form}": {"bias": rand(form)} for form in FORMS},
        **{f"mask {form}": {"mask": rand(form) > 0.3} for form in FORMS},
        "bias with -inf": {"bias": _infinite_bias()},
        "bias with finfo.min": {"bias": torch.where(rand("n1nn") > 0, 0.0, torch.finfo(torch.float32).min)},
        "bfloat16 bias": {"bias": rand("1nnn").bfloat16()},
        "expanded bias": {"bias": rand("1n1n").expand(FULL)},
        "strided mask": {"mask": (rand("n1nn").mT.contiguous().mT > 0)},
        "right padding": {"mask": padding([7, 18], kv_len)},
        "left padding": {"mask": padding([7, 18], kv_len, left=True)},
        "all padding": {"mask": padding([0, 3], kv_len)},
        "documents": documents,
        "scattered segments": scattered,
        "segments of batch 1 and 2": {"query_segments": packed(q_len, 7), "key_segments": segments(3, kv_len)},
        "sinks": {"sinks": sinks},
        "sinks and blind rows": {"sinks": sinks, "mask": rand("11n1") > 0},
        "bfloat16 sinks": {"sinks": sinks.bfloat16()},
        "sink of -inf": {"sinks": torch.tensor([0.5, -torch.inf, 3.0, 0.0]), "mask": rand("11n1") > 0},
        "large sink": {"sinks": torch.full((FULL[1],), 200.0)},
        "dropout": dropout,
        "dropout of nearly all": {"dropout_p": 0.95, "rng_state": rng},
        "all": {**dropout, **scattered, "sinks": sinks, "bias": rand("n1nn"), "mask": rand("1n1n", 5) > -1},
    }


CASES = _cases()


def grad_mask(case: dict[str, Any]) -> list[bool]:
    """All gradients that the case has."""
    return [True, True, True, "bias" in case, "sinks" in case]
