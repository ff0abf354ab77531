"""Each bad input gives one error that names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_inductor.functional import attention
from flash_inductor.ops import attn, attn_backward


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = rand(2, 4, 6, 16), rand(2, 2, 7, 16)
CASES = [
    ((rand(4, 6, 16), K, K), {}, ValueError, "query: expected 4 dims [batch, heads, length, head dim], got 3 dims"),
    ((Q, K, rand(2, 2, 7)), {}, ValueError, "value: expected 4 dims"),
    ((Q, K.bfloat16(), K), {}, TypeError, "key: expected torch.float32, the dtype of query, got torch.bfloat16"),
    ((Q.long(), K.long(), K.long()), {}, TypeError, "query: expected a dtype of float64, float32"),
    ((Q.bool(), K, K), {}, TypeError, "got torch.bool"),
    ((Q, rand(3, 2, 7, 16), K), {}, ValueError, "key: expected batch size 2, that of query, got 3"),
    ((Q, K, rand(1, 2, 7, 16)), {}, ValueError, "value: expected batch size 2, that of query, got 1"),
    ((Q, rand(2, 2, 7, 8), K), {}, ValueError, "key: expected head dim 16, that of query, got 8"),
    ((Q, K, rand(2, 2, 8, 16)), {}, ValueError, "value: expected length 7, that of key, got 8"),
    ((Q, K, rand(2, 4, 7, 16)), {}, ValueError, "value: expected 2 heads, those of key, got 4"),
    ((Q, rand(2, 3, 7, 16), rand(2, 3, 7, 16)), {}, ValueError, "a number of heads that divides the 4 of query, got 3"),
    ((Q, rand(2, 0, 7, 16), rand(2, 0, 7, 16)), {}, ValueError, "a number of heads that divides the 4 of query, got 0"),
    (
        (rand(1, 1, 3, 0), rand(1, 1, 3, 0), rand(1, 1, 3, 4)),
        {},
        ValueError,
        "query: expected a head dim of at least 1",
    ),
    ((Q, K.to("meta"), K), {}, ValueError, "key: expected device cpu, that of query, got meta"),
    ((Q, K, K), {"window_left": -1}, ValueError, "window_left: expected a distance of at least 0"),
    ((Q, K, K), {"window_right": -3}, ValueError, "window_right: expected a distance of at least 0"),
    (
        (Q, K, K),
        {"softcap": 0.0},
        ValueError,
        "softcap: expected a positive finite number, or None for no cap, got 0.0",
    ),
    ((Q, K, K), {"softcap": -2.0}, ValueError, "got -2.0"),
    ((Q, K, K), {"softcap": float("inf")}, ValueError, "got inf"),
    ((Q, K, K), {"scale": float("nan")}, ValueError, "scale: expected a finite number"),
]


@pytest.mark.parametrize(("inputs", "options", "kind", "message"), CASES, ids=[c[3] for c in CASES])
def test_bad_input(inputs, options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        attn(*inputs, **options)
    mode = FakeTensorMode()
    with mode, pytest.raises(kind, match=re.escape(message)):  # the same under torch.compile
        attn(*(mode.from_tensor(x) for x in inputs), **options)


def fake_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(("dim", "v_dim", "named"), [(12, 16, 12), (264, 16, 264), (16, 4, 4), (16, 512, 512)])
def test_head_dims_on_cuda(dim, v_dim, named):
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, value = fake_cuda(1, 2, 8, dim), fake_cuda(1, 2, 8, v_dim)
        with pytest.raises(NotImplementedError, match=f"head dim {named} of .* multiple of 8 from 8 to 256; pad it"):
            attn(query, query, value)


def test_float64_on_cuda():
    with FakeTensorMode():
        x = fake_cuda(1, 2, 8, 16, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="dtype float64 is not supported on cuda; cast to float32"):
            attn(x, x, x)


def test_what_cuda_takes_passes_its_fake():
    with FakeTensorMode():
        query, value = fake_cuda(1, 2, 8, 192), fake_cuda(1, 2, 8, 128)
        assert attn(query, query, value)[0].shape == (1, 2, 8, 128)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("grad_out", rand(2, 4, 6, 8), "grad_out: expected shape [2, 4, 6, 16], got [2, 4, 6, 8]"),
        ("grad_lse", rand(2, 4, 5), "grad_lse: expected shape [2, 4, 6], got [2, 4, 5]"),
        ("out", rand(4, 6, 16), "out: expected 4 dims [2, 4, 6, 16], got shape [4, 6, 16]"),
        ("lse", rand(2, 4, 6, 1), "lse: expected 3 dims [2, 4, 6], got shape [2, 4, 6, 1]"),
    ],
)
def test_bad_backward_input(name, replacement, message):
    out, lse = attn(Q, K, K)
    tensors = {"grad_out": out, "grad_lse": lse, "query": Q, "key": K, "value": K, "out": out, "lse": lse}
    with pytest.raises(ValueError, match=re.escape(message)):
        attn_backward(**{**tensors, name: replacement})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window_size": -1}, ValueError, "window_size: expected distances of at least 0"),
        ({"window_size": (3, -1)}, ValueError, "got (3, -1)"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size: expected an int, (left, right) or None, got 3 entries"),
        ({"window_size": 2.5}, TypeError, "window_size: expected an int, (left, right) or None, got 2.5"),
        ({"window_size": True}, TypeError, "got True"),
        ({"diagonal": "middle"}, ValueError, "diagonal: expected 'top_left', 'bottom_right' or an int, got 'middle'"),
        ({"diagonal": 1.0}, ValueError, "got 1.0"),
    ],
)
def test_bad_option_of_attention(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        attention(Q, K, K, **options)
