"""What may be changed in an attention so that it no longer is one, or only looks as if it weren't."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def _square(x: Tensor) -> bool:
    return x.shape[-1] == x.shape[-2]


def _written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    x = x.clone()
    write(x)
    return x


def _write_after_read(x: Tensor) -> Tensor:
    y = x * 1.0
    z = y + 0.0
    y.mul_(3.0)
    return z + 0.0 * y


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


def _set_first(x: Tensor, value: float) -> None:
    x[..., 0] = value


OPERAND: dict[str, Change] = {
    "heads flipped": lambda x: x.flip(1),
    "heads rolled": lambda x: x.roll(1, 1),
    "heads picked": lambda x: x[:, [1, 0, 3, 2]],
    "first head for all": lambda x: x[:, :1].expand_as(x),
    "heads regrouped": lambda x: x[:, :2].repeat(1, 2, 1, 1),
    "heads interleaved": lambda x: x[:, :2].repeat_interleave(2, 1),
    "batch flipped": lambda x: x.flip(0),
    "first batch for all": lambda x: x[:1].expand_as(x),
    "length rolled": lambda x: x.roll(1, 2),
    "transposed": lambda x: x.mT if _square(x) else x,
    "heads and length swapped": lambda x: x.permute(0, 2, 1, 3) if x.shape[1] == x.shape[2] else x,
    "batch and heads swapped": lambda x: x.transpose(0, 1) if x.shape[0] == x.shape[1] else x,
    "dims reversed": lambda x: x.permute(3, 2, 1, 0) if len(set(x.shape)) == 1 else x,
    "detached": lambda x: x.detach(),
    "without gradient": _without_grad,
    "negative": lambda x: -x,
    "relu": torch.relu,
    "scaled by a tensor": lambda x: x * torch.tensor(0.7, dtype=x.dtype),
    "scaled by head": lambda x: x * torch.arange(1, 5, dtype=x.dtype)[:, None, None],
    "scaled by position": lambda x: x / torch.arange(1, x.shape[2] + 1)[:, None],
    "scaled by feature": lambda x: x * torch.linspace(0.5, 1.5, x.shape[3], dtype=x.dtype),
    "scaled twice": lambda x: x * 0.5 * 3.0,
    "number added": lambda x: x + 0.25,
    "rounded": lambda x: x.float().double(),
    "written": lambda x: _written(x, lambda y: y.mul_(0.5)),
    "written after": _write_after_read,
    "zero dim": lambda x: x * 0.0 + x.detach(),
    "cut and joined": lambda x: torch.cat([x[:, :, 1:], x[:, :, :1]], 2),
    "padded features": lambda x: F.pad(x, (0, 4))[..., : x.shape[3]],
}
SCORES: dict[str, Change] = {
    "relu": torch.relu,
    "negative": lambda x: -x,
    "absolute": torch.abs,
    "clamped": lambda x: x.clamp(-1.0, 1.0),
    "clamped below": lambda x: x.clamp(min=-0.5),
    "floored far below": lambda x: x.clamp(min=-1e12),
    "tanh": torch.tanh,
    "rounded": lambda x: x.float().double(),
    "rounded a lot": lambda x: x.half().double(),
    "number added": lambda x: x + 0.5,
    "number multiplied": lambda x: x * 1.5,
    "zero multiplied": lambda x: x * 0.0,
    "scaled by a tensor": lambda x: x * torch.tensor(0.7, dtype=x.dtype),
    "scaled by head": lambda x: x * torch.arange(1, 5, dtype=x.dtype)[:, None, None],
    "scaled by query": lambda x: x / torch.arange(1, x.shape[-2] + 1)[:, None],
    "scaled by key": lambda x: x * torch.arange(1, x.shape[-1] + 1),
    "row added": lambda x: x + torch.arange(x.shape[-2], dtype=x.dtype)[:, None],
    "column added": lambda x: x + torch.arange(x.shape[-1], dtype=x.dtype),
    "distance added": lambda x: x - (torch.arange(x.shape[-2])[:, None] - torch.arange(x.shape[-1])).abs(),
    "added to itself": lambda x: x + x,
    "symmetric": lambda x: x + x.mT if _square(x) else x,
    "transposed": lambda x: x.mT if _square(x) else x,
    "heads flipped": lambda x: x.flip(1),
    "heads mixed": lambda x: torch.einsum("bhij,gh->bgij", x, torch.ones(4, 4, dtype=x.dtype).tril()),
    "keys flipped": lambda x: x.flip(-1),
    "queries rolled": lambda x: x.roll(1, -2),
    "lower triangle": lambda x: x.tril(),
    "detached": lambda x: x.detach(),
    "without gradient": _without_grad,
    "dropped with p = 0": lambda x: F.dropout(x, 0.0),
    "dropped in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "maximum subtracted": lambda x: x - x.amax(-1, keepdim=True),
    "maximum of queries subtracted": lambda x: x - x.amax(-2, keepdim=True).detach(),
    "mean subtracted": lambda x: x - x.mean(-1, keepdim=True).detach(),
    "NaN replaced": lambda x: x.nan_to_num(0.0),
    "first key written": lambda x: _written(x, lambda y: _set_first(y, 0.0)),
    "multiplied in place": lambda x: _written(x, lambda y: y.mul_(2.0)),
    "added in place": lambda x: _written(x, lambda y: y.add_(torch.arange(y.shape[-1]))),
    "written after": _write_after_read,
    "copied": lambda x: x.clone(),
    "reshaped": lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2]),
    "keys joined": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    "positive ones only": lambda x: torch.where(x > 0, x, 0.0),
    "normalised": lambda x: x / x.square().sum(-1, keepdim=True).sqrt(),
}
PROBABILITIES: dict[str, Change] = {
    **SCORES,
    "renormalised": lambda x: x / (x.sum(-1, keepdim=True) + 1.0),
    "softmax again": lambda x: x.softmax(-1),
    "logarithm": lambda x: torch.log(x + 1.0),
    "first key hidden": lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 0, 0.0),
    "NaN replaced": lambda x: torch.nan_to_num(x, 0.0),
    "some hidden": lambda x: torch.where(torch.arange(x.shape[-1]) > 1, x, torch.zeros((), dtype=x.dtype)),
}
MASK: dict[str, Change] = {
    "inverted": lambda m: ~m,
    "transposed": lambda m: m.mT if _square(m) else m,
    "one further": lambda m: m.roll(1, -1),
    "one lower": lambda m: m.roll(1, -2),
    "keys flipped": lambda m: m.flip(-1),
    "through numbers": lambda m: (m.double() * 2.0 - 1.0) > 0,
    "none hidden": torch.ones_like,
    "negated twice": lambda m: torch.logical_not(~m),
    "other heads": lambda m: m & (torch.arange(4)[:, None, None] > 0),
    "copied and written": lambda m: _written(m, lambda y: _set_first(y, True)),
    "first key too": lambda m: m | (torch.arange(m.shape[-1]) == 0),
    "every other key": lambda m: m & (torch.arange(m.shape[-1]) % 2 == 0),
    "exclusive or": lambda m: m ^ (torch.arange(m.shape[-1]) % 2 == 0),
}
RESULT: dict[str, Change] = {
    "written": lambda x: x.mul_(2.0),
    "added to": lambda x: x.add_(1.0),
    "transposed": lambda x: x.mT if _square(x) else x,
    "heads flipped": lambda x: x.flip(1),
    "detached": lambda x: x.detach(),
    "viewed and written": lambda x: _view_written(x),
    "first row written": lambda x: _row_written(x),
}


def _view_written(x: Tensor) -> Tensor:
    x.view(-1)[0] = 1.0
    return x


def _row_written(x: Tensor) -> Tensor:
    x[:, :, 0].zero_()
    return x


PLACES: dict[str, dict[str, Change]] = {
    "query": OPERAND,
    "key": OPERAND,
    "value": OPERAND,
    "mask": MASK,
    "raw scores": SCORES,
    "scores": SCORES,
    "masked scores": SCORES,
    "probabilities": PROBABILITIES,
    "result": RESULT,
}
MORE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scores returned": lambda s, p, out: s.exp(),
    "probabilities returned": lambda s, p, out: p,
    "log-sum-exp returned": lambda s, p, out: torch.logsumexp(s, -1).exp(),
    "entropy returned": lambda s, p, out: (p * torch.log(p + 1e-9)).sum(-1),
    "probabilities used again": lambda s, p, out: p @ p.mT,
    "result used again": lambda s, p, out: out.sum(-1),
    "detached probabilities returned": lambda s, p, out: p.detach().mean((0, 1)),
}
DIMS = {"softmax over queries": -2, "softmax over heads": 1, "softmax over batches": 0, "softmax over dim 3": 3}
OTHER = ["swap query and key", "value is key", "write query", "write value"]
CHANGES = [*(f"{place}: {name}" for place, some in PLACES.items() for name in some), *MORE, *DIMS, *OTHER]


def at(changed: frozenset[str], place: str) -> list[Change]:
    return [change for name, change in PLACES[place].items() if f"{place}: {name}" in changed]


def softmax_dim(changed: frozenset[str]) -> int:
    return next((dim for name, dim in DIMS.items() if name in changed), -1)


def more_results(changed: frozenset[str]) -> list[Callable[[Tensor, Tensor, Tensor], Tensor]]:
    return [more for name, more in MORE.items() if name in changed]
