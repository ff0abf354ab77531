"""The rules that keep a wrong replacement from happening."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_helpers import Rewriter, capture, compile_and_compare, qkv

from flash_inductor import config
from flash_inductor.matching import locate
from flash_inductor.matching.rewrite import rewrite_graph
from flash_inductor.report import collect

# --- what happens to the graph


def chain(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def test_apply_false_changes_nothing_and_says_the_same() -> None:
    gm = capture(chain, *qkv())
    before = str(gm.graph)
    sites = rewrite_graph(gm.graph, apply=False)
    assert str(gm.graph) == before
    assert [s.to_dict() for s in sites] == [s.to_dict() for s in rewrite_graph(gm.graph)] and sites[0].replaced


def test_graph_without_a_replacement_is_untouched() -> None:
    gm = capture(lambda q, k, v: torch.softmax(q @ k.mT, 2) @ v, *qkv())
    before = str(gm.graph)
    assert not rewrite_graph(gm.graph)[0].replaced
    assert str(gm.graph) == before


def test_effects_survive() -> None:
    """Nodes without users that write, or draw random numbers, are not swept away with the replaced ones."""

    def fn(q, k, v, buffer):
        buffer.add_(1)
        torch.rand(3)
        y = chain(q, k, v)
        buffer.mul_(2)
        return y, torch.rand(3)

    args = (*qkv(), torch.zeros(3))
    torch.manual_seed(0)
    expected = fn(*args)
    torch._dynamo.reset()
    backend = Rewriter()
    buffer = torch.zeros(3)
    torch.manual_seed(0)
    actual = torch.compile(fn, backend=backend)(*args[:3], buffer)
    assert [s.replaced for s in backend.sites] == [True]
    torch.testing.assert_close(actual, expected)
    assert torch.equal(buffer, args[3])


def test_result_written_in_place() -> None:
    """The op saves its output for the backward; a later write must not reach it."""

    def fn(q, k, v):
        y = chain(q, k, v)
        y.mul_(3)
        return y

    assert [s.replaced for s in compile_and_compare(fn, qkv()).sites] == [True]


def test_view_of_the_result_keeps_working() -> None:
    def fn(q, k, v):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return chain(q, k, v).view(2, -1)

    backend = compile_and_compare(fn, qkv())
    assert [s.replaced for s in backend.sites] == [True] and "contiguous.default" in backend.ops()


def test_shape_of_the_scores_may_be_used() -> None:
    def fn(q, k, v):
        s = q @ k.mT * 0.25
        return torch.softmax(s, -1) @ v * s.size(-1) + torch.zeros_like(s).sum()

    assert [s.replaced for s in compile_and_compare(fn, qkv()).sites] == [True]


def test_two_sites_in_a_row() -> None:
    backend = compile_and_compare(lambda q, k, v: chain(chain(q, k, v), k, chain(v, v, v)), qkv())
    assert [s.replaced for s in backend.sites] == [True] * 3


def test_query_scaled_in_place_is_not_looked_through() -> None:
    def fn(q, k, v):
        q = q + 0.0
        q *= 0.25
        return torch.softmax(q @ k.mT, -1) @ v

    backend = compile_and_compare(fn, qkv())
    assert [s.spec.scale for s in backend.sites if s.spec] == [1.0]


def test_query_written_after_the_site_is_not_looked_through() -> None:
    def fn(q, k, v):
        base = q + 0.0
        y = torch.softmax((base * 0.25) @ k.mT, -1) @ v
        base.add_(1)
        return y, base

    backend = compile_and_compare(fn, qkv())
    assert [s.spec.scale for s in backend.sites if s.spec] == [1.0]


# --- forms of SDPA


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_sdpa_of_any_rank(rank: int) -> None:
    shape = (2, 3, 4, 6, 8)[5 - rank :]
    args = tuple(torch.randn(shape, requires_grad=True) for _ in range(3))
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert [s.reason for s in compile_and_compare(fn, args, strides=False).sites] == [None]


def test_sdpa_broadcasts_batch_and_head() -> None:
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 8, requires_grad=True) for _ in range(2))
    assert [s.reason for s in compile_and_compare(F.scaled_dot_product_attention, (q, k, v)).sites] == [None]


@pytest.mark.parametrize("heads", [1, 2])
def test_sdpa_enable_gqa(heads: int) -> None:
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    backend = compile_and_compare(fn, qkv(kv_heads=heads))
    (op,) = [n for n in backend.graphs[0].graph.nodes if "flashbwd" in str(n.target)]
    assert [s.reason for s in backend.sites] == [None] and op.args[1].meta["example_value"].shape[1] == heads


def test_value_of_another_head_dim() -> None:
    q, k, _ = qkv()
    assert [
        s.reason for s in compile_and_compare(chain, (q, k, torch.randn(2, 4, 12, 24, requires_grad=True))).sites
    ] == [None]


# --- dtypes


def assert_as_good(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the float64 result than twice eager, or than the rounding of the largest number."""
    error, allowed = ((x.double() - exact).abs().max() for x in (actual, eager))
    assert error <= 2 * allowed + torch.finfo(eager.dtype).eps * exact.abs().max()


def double(args: Any) -> list[torch.Tensor]:
    return [x.double() for x in args]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    args = qkv(dtype=dtype)
    torch._dynamo.reset()
    backend = Rewriter()
    y = torch.compile(chain, backend=backend)(*args)
    assert [s.reason for s in backend.sites] == [None] and y.dtype is dtype
    assert_as_good(y, chain(*args), chain(*double(args)))


def test_float64() -> None:
    assert [s.reason for s in compile_and_compare(chain, qkv(dtype=torch.float64)).sites] == [None]


def upcast(q, k, v):
    p = torch.softmax(q.float() @ k.float().mT * 0.25, -1)
    return p.to(v.dtype) @ v


def upcast_all(q, k, v):
    return torch.softmax(q.float() @ k.float().mT * 0.25, -1) @ v.float()


@pytest.mark.parametrize(("fn", "dtype"), [(upcast, torch.bfloat16), (upcast_all, torch.float32)])
def test_upcasts(fn: Any, dtype: torch.dtype) -> None:
    """Query and key are taken in bfloat16 only where the values are multiplied in it."""
    backend = Rewriter()
    torch._dynamo.reset()
    y = torch.compile(fn, backend=backend)(*qkv(dtype=torch.bfloat16))
    (op,) = [n for n in backend.graphs[0].graph.nodes if "flashbwd" in str(n.target)]
    assert y.dtype is dtype and op.args[0].meta["example_value"].dtype is dtype
    args = qkv(dtype=torch.bfloat16)
    assert_as_good(y, fn(*args), chain(*double(args)))


def mixed(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1).to(v.dtype) @ v


def test_wide_query_with_narrow_value() -> None:
    q, k, v = qkv()
    args = (q, k, v.detach().bfloat16().requires_grad_())
    backend = Rewriter()
    torch._dynamo.reset()
    y = torch.compile(mixed, backend=backend)(*args)
    assert [s.reason for s in backend.sites] == [None] and y.dtype is torch.bfloat16
    assert_as_good(y, mixed(*args), chain(*double(args)))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("fn", [chain, F.scaled_dot_product_attention])
def test_autocast(fn: Any, inside: bool) -> None:
    """The op runs in autocast's dtype whether the region is part of the graph or around it; the inputs are mixed."""
    q, k, v = qkv()
    args = (q, k, v.detach().bfloat16().requires_grad_())

    def in_region(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*args)

    torch._dynamo.reset()
    backend = Rewriter()
    compiled = torch.compile(in_region if inside else fn, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        y = compiled(*args)
    expected = in_region(*args)
    assert [s.reason for s in backend.sites] == [None]
    assert y.dtype is expected.dtype is torch.bfloat16
    (op,) = [n for n in backend.graphs[0].graph.nodes if "flashbwd" in str(n.target)]
    assert op.meta["example_value"][0].dtype is torch.bfloat16
    assert_as_good(y, expected, fn(*double(args)))
    grads = [torch.autograd.grad(z.float().sum(), args) for z in (y, expected)]
    exact = torch.autograd.grad(fn(*double(args)).sum(), args)
    for a, b, e in zip(*grads, exact, strict=True):
        assert a.dtype is b.dtype
        bf16 = torch.bfloat16  # what is summed in the backward, so an error that eager happens not to have is its
        assert_as_good(a.to(bf16), b.to(bf16), e.double())


# --- dynamic sizes and numbers


@pytest.mark.parametrize("name", ["chain", "causal", "bottom_right", "sdpa"])
def test_dynamic_batch_and_length(name: str) -> None:
    def causal(q, k, v):
        n = q.shape[2]
        return torch.softmax((q @ k.mT * 0.25).masked_fill(torch.ones(n, n).triu(1).bool(), -1e9), -1) @ v

    def bottom_right(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        hide = j > i + (k.shape[2] - q.shape[2])
        return torch.softmax((q @ k.mT * 0.25).masked_fill(hide, float("-inf")), -1) @ v

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    fn = {"chain": chain, "causal": causal, "bottom_right": bottom_right, "sdpa": sdpa}[name]
    torch._dynamo.reset()
    backend = Rewriter()
    compiled = torch.compile(fn, backend=backend)
    for batch, q_len, kv_len in ((2, 5, 9), (3, 6, 11), (4, 7, 12)):
        args = qkv(batch=batch, q_len=q_len, kv_len=q_len if name == "causal" else kv_len)
        for x in args:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert [s.reason for s in backend.sites] == [None]


def test_symbolic_float_becomes_a_guarded_constant() -> None:
    def fn(q, k, v, scale):
        q, k, v = (x.reshape(x.shape[0], 4, -1, 16) for x in (q, k, v))
        return torch.softmax(q @ k.mT * scale, -1) @ v

    torch._dynamo.reset()
    backend = Rewriter()
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for scale in (0.3, 0.7, 0.7):
        torch.testing.assert_close(compiled(*qkv(), scale), fn(*qkv(), scale))
    assert [s.spec.scale for s in backend.sites if s.spec] == [0.3, 0.7]


@pytest.mark.parametrize("name", ["chain", "sdpa"])
def test_heads_and_head_dim_become_guarded_constants(name: str) -> None:
    """With dynamic=True at once, and where Dynamo has seen them change; lengths stay symbols."""

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    fn = {"chain": chain, "sdpa": sdpa}[name]
    for dynamic in (True, None):
        torch._dynamo.reset()
        backend = Rewriter()
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
        for heads, length, dim in ((4, 8, 16), (4, 12, 16), (2, 12, 16), (2, 13, 8)):
            args = qkv(heads=heads, kv_heads=heads, q_len=length, kv_len=length, dim=dim)
            torch.testing.assert_close(compiled(*args), fn(*args))
        assert [s.reason for s in backend.sites] == [None] * (3 if dynamic else 4)


def test_heads_marked_dynamic_are_refused() -> None:
    torch._dynamo.reset()
    backend = Rewriter()
    args = qkv()
    for x in args:
        torch._dynamo.mark_dynamic(x, 1)
    torch.compile(chain, backend=backend)(*args)
    assert "marked dynamic" in (backend.sites[0].reason or "")


# --- other graphs


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        n = q.shape[2]
        s = (q @ k.transpose(-1, -2) * 0.25).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        y = F.dropout(F.softmax(s, -1), 0.1, self.training) @ v
        return y + F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_exported_aten_graph() -> None:
    args = tuple(x.detach() for x in qkv())
    module = Module().eval()
    program = torch.export.export(module, args)
    sites = rewrite_graph(program.graph_module.graph)
    program.graph_module.recompile()
    assert [s.reason for s in sites] == [None, None]
    assert all("val" in n.meta for n in program.graph_module.graph.nodes if n.op == "call_function")
    torch.testing.assert_close(program.module()(*args), module(*args))


def test_cpu_off() -> None:
    with config.override(cpu="off"):
        sites = compile_and_compare(chain, qkv(), exact=True).sites
    assert "CPU" in (sites[0].reason or "") and sites[0].spec is None


def test_functorch_transforms_are_left_alone() -> None:
    def fn(q, k, v):
        return torch.func.vmap(chain)(q, k, v)

    backend = compile_and_compare(fn, tuple(x.detach() for x in qkv()))
    assert all("inside torch.func" in (s.reason or "") for s in backend.sites)


# --- the record


def test_site_says_where_and_what() -> None:
    gm = capture(Module().eval(), *qkv())
    with collect() as sites:
        rewrite_graph(gm.graph)
    first, second = sites
    assert (first.form, second.form) == ("softmax chain", "sdpa")
    assert first.location is not None and first.location.startswith("test_sites.py:") and "forward" in first.location
    assert "@ v" in (first.source or "") and first.kernel
    assert first.shapes == {"query": "f32[2, 4, 12, 16]", "key": "f32[2, 4, 12, 16]", "value": "f32[2, 4, 12, 16]"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].model.layers.0.attn", "model.layers.0.attn"),
        ("L['self']._modules['model']._modules['h']._modules['0']", "model.h.0"),
        ("L['args'][0].model.layers[3].attn", "model.layers.3.attn"),
    ],
)
def test_module_path(path: str, expected: str) -> None:
    node = torch.fx.Graph().call_function(operator.add, (1, 2))
    node.meta["nn_module_stack"] = {"x": (path, torch.nn.Linear)}
    assert locate.module(node) == expected
