"""Which nodes call the op with another kernel's name, which stay templates, and what max_autotune measures."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from fakecuda import Lowered, lower
from harness import qkv
from torch import Tensor

from flash_inductor import config
from flash_inductor._compat import inductor
from flash_inductor.lowering import kernel, measure
from flash_inductor.ops import choice, library

attn = torch.ops.flashbwd.attn
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def free_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a Triton that has Gluon and a torch that has cuDNN, whatever is installed here."""

    def takes(kind: str, dim: int, v_dim: int, dtype: torch.dtype, capability: int, scale: float) -> bool:
        return capability == 90 and dtype.itemsize == 2 and scale > 0 and (kind == "fwd" or dim == v_dim)

    monkeypatch.setattr(choice, "_gluon_takes", takes)
    monkeypatch.setattr(choice, "_cudnn", lambda: 91900)
    choice.choose.cache_clear()
    with config.override(kernel="auto"):
        yield
    choice.choose.cache_clear()


MANY = {"batch": 4, "heads": 64}


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attn(query, key, value, is_causal=True)[0]


def with_options(**options: Any) -> Callable[..., Tensor]:
    return lambda query, key, value: attn(query, key, value, **options)[0]


def kernels(lowered: Lowered) -> list[str]:
    """What each graph's node runs as: the kernel named in the call, "op" for a call without one, or "templates"."""
    found = []
    for code in lowered.codes:
        call = re.search(
            r"= torch\.ops\.flashbwd\.attn(?:_backward)?\.(?:on_cuda|default|at_site\('\w+'\))\((.*)\)", code
        )
        name = re.search(r"kernel_name='(\w+)'", call.group(1)) if call else None
        assert ("triton_tem" in code) != bool(call)
        found.append(name.group(1) if name else "op" if call else "templates")
    return found


@pytest.mark.parametrize(
    ("sizes", "options", "arch", "expected"),
    [
        ({"dim": 128}, {"is_causal": True}, "sm90", ["gluon", "gluon"]),
        ({"dim": 128}, {}, "sm90", ["gluon", "gluon"]),
        ({"dim": 64}, {"is_causal": True}, "sm90", ["gluon", "gluon"]),  # so small that the host's time counts
        ({**MANY, "dim": 64}, {"is_causal": True}, "sm90", ["cudnn", "gluon"]),
        ({**MANY, "dim": 64}, {"is_causal": True, "window_left": 1023}, "sm90", ["cudnn", "gluon"]),  # it hides nothing
        ({"dim": 64}, {"is_causal": True, "window_left": 1022}, "sm90", ["gluon", "gluon"]),
        ({"dim": 64}, {"is_causal": True, "softcap": 30.0}, "sm90", ["gluon", "gluon"]),
        ({"dim": 64}, {"is_causal": True, "diagonal": -1}, "sm90", ["gluon", "gluon"]),
        ({"dim": 64, "kv_len": 2048}, {"is_causal": True}, "sm90", ["gluon", "gluon"]),
        ({"dim": 64, "v_dim": 32}, {"is_causal": True}, "sm90", ["gluon", "templates"]),
        ({"dim": 64}, {"scale": -1.0}, "sm90", ["templates", "templates"]),
        ({"dim": 64, "dtype": torch.float32}, {"is_causal": True}, "sm90", ["templates", "templates"]),
        ({"dim": 64}, {"is_causal": True}, "sm80", ["flash", "flash"]),
        ({"dim": 64}, {"is_causal": True, "window_left": 100}, "sm80", ["templates", "templates"]),
        ({"dim": 64}, {}, "sm100", ["cudnn", "cudnn"]),
        ({**MANY, "dim": 192, "v_dim": 128}, {"is_causal": True}, "sm90", ["gluon", "cudnn"]),
        ({"dim": 64}, {"kernel_name": "triton"}, "sm90", ["templates", "gluon"]),
        ({"dim": 64}, {"kernel_name": "flash"}, "sm90", ["flash", "gluon"]),
    ],
)
def test_node(sizes: dict[str, Any], options: dict[str, Any], arch: str, expected: list[str]) -> None:
    inputs = qkv(**{"q_len": 1024, "dtype": BF16, **sizes})
    assert kernels(lower(with_options(**options), inputs, arch=arch)) == expected


def test_setting_forces_a_kernel_where_it_can() -> None:
    for name, expected in (("triton", "templates"), ("flash", "flash")):
        with config.override(kernel=name):
            assert kernels(lower(causal, qkv(q_len=1024, dim=128, dtype=BF16))) == [expected] * 2
    with config.override(kernel="flash"):
        capped = with_options(softcap=10.0)
        assert kernels(lower(capped, qkv(q_len=1024, dim=128, dtype=BF16))) == ["gluon", "gluon"]


def test_extras_stay_templates() -> None:
    inputs = qkv(q_len=256, dim=64, dtype=BF16)
    bias = torch.randn(1, 2, 256, 256, dtype=BF16)
    sinks = torch.randn(2, dtype=BF16)
    with_bias = lower(lambda q, k, v, b: attn(q, k, v, b)[0], [*inputs, bias])
    assert kernels(with_bias) == ["templates", "templates"]
    with_sinks = lower(lambda q, k, v, s: attn(q, k, v, sinks=s)[0], [*inputs, sinks])
    assert kernels(with_sinks) == ["templates", "templates"]


def test_gradient_of_lse() -> None:
    """ATen's backward would ignore it."""

    def through_lse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = attn(query, key, value)
        return out * lse[..., None].to(out.dtype)

    inputs = qkv(q_len=1024, dim=128, dtype=BF16)
    with config.override(kernel="flash"):
        assert kernels(lower(with_options(), inputs)) == ["flash", "flash"]
        assert kernels(lower(through_lse, inputs)) == ["flash", "gluon"]


def test_deterministic_algorithms() -> None:
    inputs = qkv(q_len=1024, dim=128, dtype=BF16)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels(lower(with_options(), inputs)) == ["gluon", "gluon"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_dynamic_lengths() -> None:
    """The length when traced chooses, but only among kernels that any length leaves right."""
    x = qkv(**MANY, q_len=1024, dim=64, dtype=BF16)[0]
    torch._dynamo.mark_dynamic(x, 2)
    assert kernels(lower(lambda x: causal(x, x, x), [x])) == ["cudnn", "gluon"]
    # At 1024 this window hides nothing, but it will of longer sequences.
    window = with_options(is_causal=True, window_left=1023)
    assert kernels(lower(lambda x: window(x, x, x), [x])) == ["gluon", "gluon"]
    # SDPA's causal mask and the one of the lower right corner are the same only if the lengths are.
    cross: list[Any] = qkv(q_len=1024, kv_len=1280, dim=64, dtype=BF16)
    for x in cross:
        torch._dynamo.mark_dynamic(x, 2)
    assert kernels(lower(causal, cross)) == ["gluon", "gluon"]

    def bottom_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attn(query, key, value, is_causal=True, diagonal=-(query.shape[2] - key.shape[2]))[0]

    assert kernels(lower(bottom_right, cross)) == ["gluon", "gluon"]


def test_unaligned_strides_stay_templates() -> None:
    """No 16-byte loads of rows 68 elements apart, nor of an expanded key."""
    wide = [x.detach() for x in qkv(q_len=256, dim=68, dtype=BF16)]
    assert kernels(lower(lambda q, k, v: causal(*(x[..., :64] for x in (q, k, v))), wide)) == ["templates"]
    inputs = [x.detach() for x in qkv(q_len=256, dim=64, dtype=BF16)]
    expanded = lower(lambda q, k, v: causal(q, k[:, :1].expand(-1, 2, -1, -1), v), inputs)
    assert kernels(expanded) == ["templates"]


def test_computed_inputs_keep_the_traced_layout() -> None:
    """The output follows query: with the heads inside, what comes next needs no copy."""

    def block(x: Tensor) -> Tensor:
        query, key, value = (x.unflatten(2, (2, 64)).transpose(1, 2) * f for f in (2, 3, 4))
        return causal(query, key, value).transpose(1, 2).flatten(2)

    lowered = lower(block, [torch.randn(2, 256, 128, dtype=BF16)])
    assert kernels(lowered) == ["gluon"]
    after = lowered.text.split("= torch.ops.flashbwd.attn.at_site(")[-1]
    assert "triton_" not in after.partition("return")[0]
    assert "(2, 2, 256, 64), (32768, 64, 128, 1)" in after


def test_without_the_dispatcher() -> None:
    """Where sizes are known, generated code calls a site that knows its kernel; else what finds out each time."""
    inputs = qkv(q_len=1024, dim=128, dtype=BF16)
    lowered = lower(causal, inputs)
    found = [re.findall(r"= (torch\.ops\.flashbwd\.\w+\.at_site\('\w{16}'\))\(", code) for code in lowered.codes]
    assert [len(names) for names in found] == [1, 1]
    sites = [eval(names[0], {"torch": torch}) for names in found]
    assert all(isinstance(site, library.Site) for site in sites) and sites[0] is eval(found[0][0], {"torch": torch})
    other = lower(causal, qkv(q_len=1152, dim=128, dtype=BF16))
    assert found[0][0] in lower(causal, inputs).codes[0] and found[0][0] not in other.codes[0]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    lowered = lower(causal, inputs)
    assert "= torch.ops.flashbwd.attn.on_cuda(" in lowered.codes[0]
    assert "= torch.ops.flashbwd.attn_backward.on_cuda(" in lowered.codes[1]
    assert callable(torch.ops.flashbwd.attn.on_cuda) and callable(torch.ops.flashbwd.attn_backward.on_cuda)


def test_an_unknown_option_names_no_site() -> None:
    names = [kernel._site_name([], {"window_left": x}) for x in (5, sympy.Integer(5), sympy.Symbol("s0"), None)]
    assert names[0] == names[1] and names[2] is None and names[3] not in (None, names[0])


@pytest.mark.parametrize("results", [None, [], [torch.zeros(1)], [object()]])
def test_the_op_is_called_where_private_names_moved(results: Any) -> None:
    inductor.call_directly(results, "torch.ops.flashbwd.attn.on_cuda")


def test_cpp_wrapper_names_the_kernel() -> None:
    lowered = lower(causal, qkv(q_len=1024, dim=128, dtype=BF16), cpp_wrapper=True)
    # torch 2.11 writes Python first, and C++ once that has run.
    assert lowered.codes
    name = r"kernel_name='gluon'|std::string\(\"gluon\"\)|PyUnicode_FromString\(\"gluon\"\)"
    assert all(re.search(name, code) for code in lowered.codes)


class TestMeasured:
    @pytest.fixture(autouse=True)
    def _timer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {"triton": 4.0, "gluon": 3.0, "cudnn": 2.0, "flash": 1.0}
        self.timed: list[str] = []
        self.keywords: list[dict[str, Any]] = []
        monkeypatch.setattr(measure, "_fastest", {})
        monkeypatch.setattr(inductor, "real_like", lambda inputs, device: [None for _ in inputs])
        monkeypatch.setattr(measure, "attn", self.op)
        monkeypatch.setattr(measure, "attn_backward", self.op)
        monkeypatch.setattr(inductor, "milliseconds", lambda function: function())

    def op(self, *tensors: Tensor, kernel_name: str, **options: Any) -> Any:
        self.timed.append(kernel_name)
        self.keywords.append(options)
        time = self.times[kernel_name]
        if time is None:
            raise RuntimeError("no plan")
        return time

    def run(self, function: Callable[..., Tensor], **sizes: Any) -> list[str]:
        inputs = [x.detach() for x in qkv(**{"q_len": 512, "dim": 128, "dtype": BF16, **sizes})]
        # Templates would be measured too, which nothing can do here.
        return kernels(lower(function, inputs, max_autotune=True, max_autotune_gemm_backends="ATEN"))

    def test_the_fastest_is_called(self) -> None:
        assert self.run(causal) == ["flash"]
        assert self.timed == ["triton", "gluon", "cudnn", "flash"]
        assert all(keywords["is_causal"] for keywords in self.keywords)

    def test_once_per_problem(self) -> None:
        def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return causal(causal(query, key, value), key, value)

        self.run(twice)
        self.run(causal)
        assert len(self.timed) == 4
        self.run(causal, q_len=640)
        assert len(self.timed) == 8

    def test_failures_are_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        self.times["flash"] = None  # type: ignore[assignment]
        with caplog.at_level(logging.INFO, logger="flash_inductor.lowering.measure"):
            assert self.run(causal) == ["cudnn"]
        messages = [r.getMessage() for r in caplog.records]
        assert any(m.startswith("flash is left out") and "no plan" in m for m in messages)
        assert any("cudnn 2.000 ms, gluon 3.000 ms, triton 4.000 ms" in m for m in messages)

    def test_only_what_takes_the_problem(self) -> None:
        assert self.run(with_options(softcap=5.0)) == ["gluon"]
        assert self.timed == ["triton", "gluon"]

    def test_without_tensors_the_table_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(*args: Any) -> Tensor:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(inductor, "real_like", no_memory)
        assert self.run(causal, q_len=1024) == ["gluon"]
        assert self.run(causal, q_len=512) == ["gluon"]
        assert self.run(causal, **MANY, q_len=512) == ["cudnn"]
        assert not self.timed
