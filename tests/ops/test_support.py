"""The capability rules, without tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flash_inductor.ops import attn
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.support import effective_mask, kernel_name, unsupported_reasons
from flash_inductor.testing import make_inputs

SHAPE = (2, 8, 128, 64)
SPEC = AttentionSpec()


def reasons(q=SHAPE, k=SHAPE, v=SHAPE, dtype="bfloat16", device="cuda", **options):
    return unsupported_reasons(SPEC, q, k, v, dtype, device, **options)


@pytest.mark.parametrize("dim", [8, 40, 64, 96, 256])
def test_supported(dim):
    shape = (*SHAPE[:3], dim)
    assert reasons(shape, shape, shape) == []
    assert reasons(shape, (2, 2, 77, dim), (2, 2, 77, 128)) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"q": SHAPE[1:]}, "query has 3 dims"),
        ({"dtype": "float64"}, "float64 is not supported on cuda"),
        ({"dtype": "int64", "device": "cpu"}, "int64 is not supported on cpu"),
        ({"device": "xpu"}, "device xpu has no kernels"),
        ({"q": (2, 8, 128, 4), "k": (2, 8, 128, 4)}, "head dim 4 of query and key"),
        ({"v": (2, 8, 128, 260)}, "head dim 260 of value"),
        ({"k": (2, 3, 128, 64), "v": (2, 3, 128, 64)}, "8 query heads are not a multiple of 3"),
        ({"v": (2, 4, 128, 64)}, "key has 8 heads and value 4"),
        ({"k": (2, 8, 128, 32)}, "query has head dim 64 and key 32"),
    ],
)
def test_unsupported_says_why_and_what_to_do(arguments, words):
    (reason,) = reasons(**arguments)
    assert words in reason
    assert "; " in reason and reason.endswith(".")


def test_symbolic_sizes_are_unknown():
    """No comparison, so no guard: an object without any operator passes."""
    size = object()
    shape = (size, size, size, size)
    assert reasons(shape, shape, shape) == []
    assert kernel_name(SPEC, shape, shape, shape, "bfloat16", "cuda") == "Triton templates"
    assert kernel_name(SPEC, shape, shape, shape, "float32", "cpu") == "tiled CPU kernel"


def name(device="cpu", spec=SPEC, v=SHAPE, **options):
    return kernel_name(spec, SHAPE, SHAPE, v, "float32", device, **options)


def test_kernel_names():
    assert name("cuda", capability=(9, 0)) == "Triton templates (sm_90)"
    assert name("cuda", lowering="extern") == "eager Triton kernel"
    assert name("cuda", capability=(9, 0), chosen=("gluon", "gluon")) == "Hopper Gluon kernels (sm_90)"
    assert name("cuda", chosen=("cudnn", "triton")) == "cuDNN, backward Triton templates"
    assert name() == "ATen CPU flash"
    assert name(spec=AttentionSpec(mask=MaskSpec(None, 0))) == "ATen CPU flash"
    assert name(spec=AttentionSpec(mask=MaskSpec(-1000, 0))) == "ATen CPU flash"  # the window hides nothing
    assert name(spec=AttentionSpec(mask=MaskSpec(-10, 0))) == "tiled CPU kernel"
    assert name(spec=AttentionSpec(softcap=5.0)) == "tiled CPU kernel"
    assert name(spec=AttentionSpec(scale=-1.0)) == "tiled CPU kernel"
    assert name(spec=AttentionSpec(extras=("padding",))) == "ATen CPU flash"
    assert name(spec=AttentionSpec(extras=("mask",))) == "tiled CPU kernel"
    assert name(v=(2, 8, 128, 32)) == "tiled CPU kernel"


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window_left": 500}, {"softcap": 3.0}, {"window_left": 5}]
)
def test_the_name_is_the_kernel_that_runs(options):
    called = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    from flash_inductor.ops import cpu

    inputs = make_inputs()
    everything = {"scale": None, "is_causal": False, "window_left": None, "window_right": None, "diagonal": 0}
    with Watch():
        cpu.forward(*inputs, **{**everything, "softcap": None, **options})
    window = {k: v for k, v in options.items() if k != "softcap"}
    spec = AttentionSpec(mask=MaskSpec.from_window(**window), softcap=options.get("softcap"))
    said = kernel_name(spec, *(x.shape for x in inputs), "float32", "cpu")
    ran_aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in called
    assert said == ("ATen CPU flash" if ran_aten else "tiled CPU kernel")
    assert attn(*inputs, **options)[0].isfinite().all()


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("kv_len", [1, 4])
def test_effective_mask_sees_the_same(q_len, kv_len):
    from flash_inductor.reference import visible

    for lower in (None, *range(-6, 6)):
        for upper in (None, *range(-6, 6)):
            mask = MaskSpec(lower, upper)
            assert torch.equal(
                visible(effective_mask(mask, q_len, kv_len), q_len, kv_len), visible(mask, q_len, kv_len)
            )


def test_support_needs_no_torch():
    """The rules can be read by tools that don't load torch: the module itself imports only the spec."""
    code = (
        "import importlib.util, sys, types, pathlib; root = pathlib.Path('flash_inductor').resolve();"
        "package = types.ModuleType('flash_inductor'); package.__path__ = [str(root)];"
        "sys.modules['flash_inductor'] = package; import flash_inductor.support; assert 'torch' not in sys.modules"
    )
    root = __file__.rsplit("/tests/", 1)[0]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
