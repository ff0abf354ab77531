"""What PyTorch is told about the optional tensors: opcheck, gradcheck, compile, vmap, autocast, errors."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo.testing
from extra_cases import BANDS, CASES, FORMS, FULL, SIZES, grad_mask, packed, padding, rand, segments
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_inductor.functional import attention
from flash_inductor.ops import attn, attn_backward, empty_like_layout
from flash_inductor.testing import make_inputs

SMALL = {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 5, "kv_len": 6, "head_dim": 3}
SMALL_FULL = (2, 2, 5, 6)


@pytest.mark.parametrize("name", ["bias n1nn", "expanded bias", "mask 1nnn", "documents", "sinks", "dropout", "all"])
def test_opcheck(name):
    case = {k: v.clone().requires_grad_() if k in ("bias", "sinks") else v for k, v in CASES[name].items()}
    inputs = make_inputs("bnhd", **SIZES, requires_grad=True)
    torch.library.opcheck(attn, inputs, {**case, "is_causal": True})
    detached = {k: v.detach() if torch.is_tensor(v) else v for k, v in case.items()}
    plain = [x.detach() for x in inputs]
    out, lse = attn(*plain, **detached)
    options = {**detached, "grad_mask": grad_mask(case)}
    torch.library.opcheck(attn_backward, (torch.randn_like(out), torch.randn_like(lse), *plain, out, lse), options)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.double().requires_grad_()


GRADCHECKS = {
    **{f"bias {form}": {"bias": leaf(rand(form, full=SMALL_FULL))} for form in FORMS},
    "sinks": {"sinks": leaf(torch.tensor([0.5, -1.0]))},
    "sinks and blind rows": {
        "sinks": leaf(torch.tensor([0.5, -1.0])), "mask": rand("n1n1", full=SMALL_FULL) > 0
    },
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([11, 5])},
    "padding": {"mask": padding([2, 5], 6)},
    "all": {
        "bias": leaf(rand("1nnn", full=SMALL_FULL)), "sinks": leaf(torch.tensor([0.5, -1.0])), "dropout_p": 0.4,
        "rng_state": torch.tensor([11, 5]), "mask": rand("n11n", full=SMALL_FULL) > -1,
        "query_segments": segments(1, 5, count=2), "key_segments": segments(2, 6, count=2),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GRADCHECKS)
@pytest.mark.parametrize("band", BANDS)
def test_gradcheck(name, band):
    case = GRADCHECKS[name]
    names = [k for k in ("bias", "sinks") if k in case]
    inputs = make_inputs(**SMALL, dtype=torch.float64, requires_grad=True)

    def function(query, key, value, *rest):
        out, lse = attn(query, key, value, **{**case, **dict(zip(names, rest, strict=True))}, **BANDS[band])
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, (*inputs, *(case[k] for k in names)), fast_mode=True)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_dtype_of_the_gradient_of_a_bias(layout, dtype):
    bias = {
        "contiguous": rand("1nnn"),
        "transposed": rand("1nnn", full=(2, 4, 18, 21)).mT,
        "expanded": rand("1n1n").expand(1, *FULL[1:]),
    }[layout].to(dtype)
    inputs = make_inputs(**SIZES)
    out, lse = attn(*inputs, bias)
    args = (torch.ones_like(out), None, *inputs, out, lse, bias)
    mask = [False, False, False, True, False]
    grad = attn_backward(*args, grad_mask=mask)[3]
    mode = FakeTensorMode()
    with mode:
        fake = attn_backward(*(None if x is None else mode.from_tensor(x) for x in args), grad_mask=mask)[3]
    want = empty_like_layout(bias, bias.shape)
    assert (grad.dtype, grad.shape, grad.stride()) == (fake.dtype, fake.shape, fake.stride())
    assert (grad.dtype, grad.stride()) == (dtype, want.stride())


@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)])
def test_compile(backend, dynamic):
    torch._dynamo.reset()
    rng = torch.tensor([3, 4])

    def function(query, key, value, bias, mask, ids, sinks):
        return attention(
            query, key, value, bias=bias, mask=mask, query_segments=ids, key_segments=ids, sinks=sinks,
            dropout_p=0.2, rng_state=rng, is_causal=True, return_lse=True,
        )  # fmt: skip

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (130, 300):
        inputs = make_inputs("bnhd", kv_heads=2, q_len=length, requires_grad=True)
        bias = rand("1nnn", full=(2, 4, length, length)).requires_grad_()
        sinks = torch.randn(4, requires_grad=True)
        extras = (bias, padding([length // 2, length], length), packed(length, 70), sinks)
        got, want = compiled(*inputs, *extras), function(*inputs, *extras)
        torch.testing.assert_close(got, want)
        leaves = (*inputs, bias, sinks)
        grads = [torch.autograd.grad(out.sum() + lse.sum(), leaves) for out, lse in (got, want)]
        torch.testing.assert_close(*grads)
    assert counter.frame_count == (1 if dynamic else 2)


def test_compile_draws_another_dropout_each_time():
    torch._dynamo.reset()
    inputs = make_inputs()
    compiled = torch.compile(lambda *x: attention(*x, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    first, second = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(compiled(*inputs), first)


def test_autocast_leaves_the_optional_tensors_alone():
    query, key, value = make_inputs(**SIZES)
    case = CASES["all"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attn(query, key, value, **case)
    want = attn(*(x.bfloat16() for x in (query, key, value)), **case)
    torch.testing.assert_close((out, lse), want, rtol=0, atol=0)
    assert out.dtype == torch.bfloat16


VMAPS = {
    # name: (optional tensors of 3 samples, their mapped dims)
    "shared bias": ({"bias": rand("nnnn")}, {"bias": None}),
    "broadcast bias": ({"bias": rand("1nnn")}, {"bias": None}),
    "bias": ({"bias": torch.randn(4, 3, 1, 21, 18)}, {"bias": 1}),
    "shared padding": ({"mask": padding([7, 18], 18)}, {"mask": None}),
    "padding": ({"mask": torch.rand(3, 2, 1, 1, 18) > 0.3}, {"mask": 0}),
    "segments": (
        {"query_segments": segments(1, 21).expand(3, 2, 21), "key_segments": segments(2, 18)},
        {"query_segments": 0, "key_segments": None},
    ),
    "shared sinks": ({"sinks": torch.randn(4)}, {"sinks": None}),
    "sinks": ({"sinks": torch.randn(4, 3)}, {"sinks": 1}),
    "dropout": ({"rng_state": torch.tensor([1, 2])}, {"rng_state": None}),
    "dropouts": ({"rng_state": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"rng_state": 0}),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap(name):
    """Samples together give what each gives alone, gradients too."""
    extras, dims = VMAPS[name]
    if name == "bias":
        extras = {"bias": extras["bias"].permute(2, 1, 0, 3, 4)}  # samples second
    options = {"dropout_p": 0.3} if "rng_state" in extras else {}
    samples = [x.unflatten(0, (3, 2)) for x in make_inputs(**{**SIZES, "batch": 6})]
    names = list(extras)
    asked = [True, True, True, "bias" in extras, "sinks" in extras]

    def function(query, key, value, *rest):
        given = dict(zip(names, rest, strict=True))
        out, lse = attn(query, key, value, **given, **options)
        grads = attn_backward(
            torch.ones_like(out), None, query, key, value, out, lse, **given, **options, grad_mask=asked
        )
        return (out, lse, *(grad for grad, wanted in zip(grads, asked, strict=True) if wanted))

    in_dims = (0, 0, 0, *(dims[n] for n in names))
    got = torch.vmap(function, in_dims=in_dims)(*samples, *extras.values())
    for i in range(3):
        alone = [x if dims[n] is None else x.select(dims[n], i) for n, x in extras.items()]
        want = function(*(x[i] for x in samples), *alone)
        torch.testing.assert_close(tuple(x[i] for x in got), want)


def test_gradient_of_a_bias_that_samples_share():
    inputs = make_inputs(**{**SIZES, "batch": 6})
    samples = [x.unflatten(0, (3, 2)) for x in inputs]
    bias = rand("1nnn").requires_grad_()
    out = torch.vmap(lambda *x: attn(*x)[0], in_dims=(0, 0, 0, None))(*samples, bias)
    (got,) = torch.autograd.grad(out.square().sum(), bias)
    (want,) = torch.autograd.grad(attn(*inputs, bias)[0].square().sum(), bias)
    torch.testing.assert_close(got, want)


Q, K = torch.zeros(2, 4, 6, 16), torch.zeros(2, 2, 7, 16)
IDS, RNG = torch.zeros(1, 6, dtype=torch.int32), torch.tensor([1, 2])
ERRORS = [
    ({"bias": torch.zeros(2, 4, 6)}, ValueError, "bias: expected 4 dims [2, 4, 6, 7], got shape [2, 4, 6]"),
    (
        {"bias": torch.zeros(2, 3, 6, 7)},
        ValueError,
        "bias: expected shape [2, 4, 6, 7], where dims may be 1, got [2, 3",
    ),
    (
        {"bias": torch.ones(1, 1, 6, 7).bool()},
        TypeError,
        "bias: expected a dtype of float64, float32, bfloat16, float16",
    ),
    ({"mask": torch.zeros(1, 1, 6, 7)}, TypeError, "mask: expected a dtype of bool, got torch.float32"),
    ({"mask": torch.ones(2, 7).bool()}, ValueError, "mask: expected 4 dims [2, 4, 6, 7], got shape [2, 7]"),
    ({"query_segments": IDS}, ValueError, "key_segments: expected a tensor, because query_segments is given, got None"),
    ({"key_segments": IDS.new_zeros(1, 7)}, ValueError, "query_segments: expected a tensor, because key_segments"),
    ({"query_segments": IDS, "key_segments": IDS}, ValueError, "key_segments: expected shape [2, 7], got [1, 6]"),
    ({"query_segments": IDS.long(), "key_segments": IDS}, TypeError, "query_segments: expected a dtype of int32, got"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks: expected shape [4], got [2]"),
    ({"rng_state": RNG}, ValueError, "rng_state: expected None, because dropout_p is 0, got a tensor"),
    ({"dropout_p": 0.1}, ValueError, "rng_state: expected a tensor with seed and offset, got None"),
    ({"dropout_p": 0.1, "rng_state": RNG.int()}, TypeError, "rng_state: expected a dtype of int64, got torch.int32"),
    (
        {"dropout_p": 1.0, "rng_state": RNG},
        ValueError,
        "dropout_p: expected a probability of at least 0 and below 1, got",
    ),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability of at least 0"),
    ({"key_range": torch.zeros(2, 2, 2).int()}, ValueError, "key_range: expected shape [2, 1, 2], got [2, 2, 2]"),
    (
        {"bias": torch.zeros(1, 1, 6, 7, device="meta")},
        ValueError,
        "bias: expected device cpu, that of query, got meta",
    ),
]


@pytest.mark.parametrize(("extras", "kind", "message"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(extras, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        attn(Q, K, K, **extras)
    mode = FakeTensorMode()
    given = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in extras.items()}
    with mode, pytest.raises(kind, match=re.escape(message)):
        attn(*(mode.from_tensor(x) for x in (Q, K, K)), **given)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([True, True, True, True, False], "grad_mask: expected no gradient of bias to be asked for"),
        ([True, True, True, False, True], "grad_mask: expected no gradient of sinks to be asked for"),
        ([True, True, True], "grad_mask: expected 5 entries, got 3"),
    ],
)
def test_errors_of_grad_mask(asked, message):
    out, lse = attn(Q, K, K)
    with pytest.raises(ValueError, match=re.escape(message)):
        attn_backward(out, None, Q, K, K, out, lse, grad_mask=asked)


def test_only_needed_gradients_are_asked_for():
    inputs = make_inputs(**SIZES)
    bias, sinks = rand("1nnn").requires_grad_(), torch.randn(4, requires_grad=True)
    for needed in ((bias,), (sinks,), (bias, sinks)):
        given = {"bias": bias, "sinks": sinks}
        given = {k: v if any(v is x for x in needed) else v.detach() for k, v in given.items()}
        grads = torch.autograd.grad(attn(*inputs, **given)[0].square().sum(), needed)
        assert all(grad.shape == x.shape and grad.any() for grad, x in zip(grads, needed, strict=True))
