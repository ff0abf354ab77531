"""Generated code with bias, mask, segments, dropout and sinks, executed, against the op on the CPU in float64."""

from __future__ import annotations

import re
from typing import Any

import harness
import pytest
import torch
from fakecuda import lower
from harness import Case, qkv
from torch import Tensor

attn = torch.ops.flashbwd.attn
block_ranges = torch.ops.flashbwd.block_ranges
FULL = (2, 2, 40, 50)


def small(**sizes: Any) -> list[Tensor]:
    return qkv(**{"batch": 2, "q_len": 40, "kv_len": 50, "heads": 2, "kv_heads": 1, **sizes})


def pairs(dims: str, sizes: tuple[int, ...] = FULL) -> Tensor:
    """A bias that needs a gradient and varies in these dims out of "bhmn"."""
    shape = [size if name in dims else 1 for name, size in zip("bhmn", sizes, strict=True)]
    return torch.randn(shape).requires_grad_()


def first(*inputs: Tensor) -> list[Tensor]:
    """The inputs, touched in this order: Dynamo orders the inputs of a graph by their first use."""
    return [x.view_as(x) for x in inputs]


def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return attn(query, key, value, bias, **options)[0]


def through_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    # what is added to a whole row shows in lse only
    out, lse = attn(query, key, value, bias, softcap=3.0)
    return out * lse[..., None]


def relative_positions(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """A bias that is gathered from a table, has strides of its own, and is expanded over the batch."""
    query, key, value = first(query, key, value)
    index = torch.arange(40, device=query.device)[:, None] - torch.arange(50, device=query.device) + 49
    bias = table[index].permute(2, 0, 1).expand(2, -1, -1, -1)
    return attn(query, key, value, bias, is_causal=True)[0]


def with_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attn(query, key, value, None, mask, is_causal=True)[0]


def padded(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    query, key, value = first(query, key, value)
    mask = visible.bool()[:, None, None, :]
    ranges = block_ranges(mask, None, None, query.shape[2], key.shape[2])
    return attn(query, key, value, None, mask, None, None, None, None, *ranges)[0]


def documents(query: Tensor, key: Tensor, value: Tensor, segments: Tensor) -> Tensor:
    query, key, value = first(query, key, value)
    ranges = block_ranges(None, segments, segments, query.shape[2], key.shape[2])
    return attn(query, key, value, None, None, segments, segments, None, None, *ranges, is_causal=True)[0]


def chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    ids = (torch.arange(query.shape[2], device=query.device) // 16).int()[None]
    return attn(query, key, value, query_segments=ids, key_segments=ids, is_causal=True)[0]


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attn(query, key, value, sinks=sinks, is_causal=True, window_left=9, diagonal=-8)
    return out + lse[..., None]


def dropped(query: Tensor, key: Tensor, value: Tensor, rng_state: Tensor) -> Tensor:
    return attn(query, key, value, rng_state=rng_state, dropout_p=0.3, is_causal=True)[0]


def everything(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor, ids: Tensor, sinks: Tensor,
               rng_state: Tensor) -> Tensor:  # fmt: skip
    query, key, value, bias, mask = first(query, key, value, bias, mask)
    key_ids = ids[:, :1].expand(-1, key.shape[2])
    return attn(query, key, value, bias, mask, ids, key_ids, sinks, rng_state, dropout_p=0.1, softcap=4.0)[0]


def lengths(*count: int, length: int = 50) -> Tensor:
    """int64 [batch, length]: 1 up to count, 0 from there on, as tokenizers give it."""
    return (torch.arange(length) < torch.tensor(count)[:, None]).long()


def sorted_ids(length: int) -> Tensor:
    return torch.randint(3, (2, length), dtype=torch.int32).sort(-1).values


RNG_STATE = torch.tensor([123_456_789_012, 3])
CASES: dict[str, Any] = {
    **{f"bias {dims}": (lambda dims=dims: Case(with_bias, [*small(), pairs(dims)])) for dims in ("bhmn", "hmn")},
    **{
        f"bias {dims or 'scalar'}": (lambda dims=dims: Case(through_lse, [*small(), pairs(dims)]))
        for dims in ("hn", "")
    },
    "bias without gradient": lambda: Case(with_bias, [*small(), pairs("hmn").detach()]),
    "only the bias": lambda: Case(with_bias, [*(x.detach() for x in small()), pairs("hmn")]),
    "relative positions": lambda: Case(relative_positions, [*small(), torch.randn(89, 2, requires_grad=True)]),
    "mask": lambda: Case(with_mask, [*small(), torch.rand(FULL) < 0.7]),
    "mask of rows": lambda: Case(with_mask, [*small(), torch.rand(1, 2, 40, 1) < 0.7]),
    "padding": lambda: Case(padded, [*small(kv_len=150), lengths(130, 20, length=150)]),
    "documents": lambda: Case(documents, [*small(q_len=150, kv_len=150), sorted_ids(150)]),
    "chunks": lambda: Case(chunks, small(kv_len=40)),
    "sinks": lambda: Case(with_sinks, [*small(), torch.randn(2, requires_grad=True)]),
    "dropout": lambda: Case(dropped, [*small(), RNG_STATE]),
    "everything": lambda: Case(
        everything,
        [*small(), pairs("hmn"), torch.rand(FULL) < 0.7, sorted_ids(40), torch.randn(2).requires_grad_(), RNG_STATE],
    ),
    "dynamic lengths": lambda: Case(
        padded,
        dynamic([*small(q_len=24, kv_len=140), lengths(140, 9, length=140)]),
        # as many blocks as it was compiled for: one or several is a matter of guards
        runs=[[*small(q_len=n, kv_len=m), lengths(m, 9, length=m)] for n, m in ((24, 140), (33, 190))],
    ),
}  # fmt: skip


def dynamic(inputs: list[Tensor]) -> list[Tensor]:
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2 if x.dim() == 4 else 1)
    return inputs


@pytest.fixture(scope="module")
def executed() -> Any:
    return harness.execute(CASES)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_op(name: str, executed: Any) -> None:
    _, errors = executed[name]
    assert not isinstance(errors, str), errors
    assert max(errors) <= harness.TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("name", CASES)
def test_only_our_templates(name: str, executed: Any) -> None:
    lowered, _ = executed[name]
    text = lowered.text
    assert "import forward_tile" in text
    assert ("import bias_blocks, grad_bias_tile" in text) == (
        name.startswith(("bias", "relative", "only", "everything")) and name != "bias without gradient"
    )
    for other in ("extern_kernels.", "torch.ops.flashbwd", "aten.bmm"):
        assert not [line for line in text.splitlines() if other in line and not line.lstrip().startswith("#")]


def allocations(code: str) -> list[tuple[int, ...]]:
    found = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code)
    return [tuple(int(size) for size in shape.split(",") if size.strip()) for shape in found]


def test_an_expanded_bias_is_not_stored(executed: Any) -> None:
    lowered, _ = executed["relative positions"]
    assert (2, 40, 50) in [shape[-3:] for shape in allocations(lowered.codes[0])]
    assert FULL not in allocations(lowered.codes[0])


def test_features_that_are_off_leave_no_argument() -> None:
    lowered = lower(lambda q, k, v: attn(q, k, v, is_causal=True)[0], small())
    for kernel in harness.interp.kernel_sources(lowered.text):
        if kernel.is_template:
            assert "FEATURES : tl.constexpr = 0\n" in kernel.body
            assert not re.search(r"arg_(BIAS|MASK|Q_SEGMENTS|RNG_STATE|SINKS|RANGE)", kernel.body)


def test_ranges_reach_both_directions(executed: Any) -> None:
    """key_range bounds the loops over keys, query_range those over queries; the bias has no use for either."""
    lowered, _ = executed["padding"]
    bodies = [k.body for k in harness.interp.kernel_sources(lowered.text) if k.is_template]
    assert len(bodies) == 3 and all("RANGE = arg_RANGE" in body for body in bodies)
