"""Which kernel takes what, which is chosen, and how the CUDA module launches it: with stand-ins for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor import config
from flash_inductor.kernels import choices
from flash_inductor.kernels.choices import KERNELS, Row
from flash_inductor.ops import aten, attn, attn_backward, choice, cuda, hopper, hopper_backward, library
from flash_inductor.ops.choice import Problem, choose, classify, eligible, refusal
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import make_inputs

BF16 = torch.bfloat16


def takes(kind: str, dim: int, v_dim: int, dtype: torch.dtype, capability: int, scale: float) -> bool:
    return capability == 90 and dtype.itemsize == 2 and scale > 0 and (kind == "fwd" or dim == v_dim)


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "_gluon_takes", takes)
    monkeypatch.setattr(choice, "_cudnn", lambda: 91900)
    choose.cache_clear()
    yield
    choose.cache_clear()


def problem(**changes: Any) -> Problem:
    return Problem("fwd", 90, BF16, 128, 128, (4096, 4096), "causal", True)._replace(**changes)


def test_all_take_plain_causal_attention() -> None:
    assert eligible(problem()) == KERNELS
    assert eligible(problem(kind="bwd")) == KERNELS


ATEN = {"cudnn", "flash"}


def repr_sorted(value: object) -> str:
    """A set's own order differs between processes, and with it the test's name."""
    return str(sorted(value) if isinstance(value, set) else value)


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ({"softcap": True}, ATEN),
        ({"square": False}, ATEN),
        ({"band": "window", "square": False}, ATEN),
        ({"v_head_dim": 64}, ATEN),
        ({"kind": "bwd", "v_head_dim": 64}, {*ATEN, "gluon"}),
        ({"head_dim": 192}, {"flash"}),
        ({"kind": "bwd", "head_dim": 192}, {"flash", "gluon"}),
        ({"capability": 100, "head_dim": 192}, {*ATEN, "gluon"}),
        ({"kind": "bwd", "grad_lse": True}, ATEN),
        ({"kind": "bwd", "deterministic": True}, {"cudnn"}),
        ({"deterministic": True}, set()),
        ({"scale": -0.1}, {*ATEN, "gluon"}),
        ({"scale": 0.1}, set()),
        ({"extras": True}, {*ATEN, "gluon"}),
        ({"dtype": torch.float32}, {*ATEN, "gluon"}),
        ({"lengths": (32, 32)}, {"cudnn"}),
        ({"capability": 80}, {"gluon", "cudnn"}),
        ({"capability": 75}, {"gluon", *ATEN}),
        ({"capability": 100}, {"gluon"}),
        ({"capability": 100, "head_dim": 256, "v_head_dim": 256}, {"gluon", "cudnn"}),
        ({"capability": 86, "head_dim": 256, "v_head_dim": 256}, {"gluon", *ATEN}),
        ({"head_dim": 256, "v_head_dim": 256}, set()),
        ({"head_dim": 68, "v_head_dim": 68}, ATEN),
    ],
    ids=repr_sorted,
)
def test_who_is_out(changes: dict[str, Any], out: set[str]) -> None:
    changed = problem(**changes)
    assert set(KERNELS) - set(eligible(changed)) == out
    for kernel in out - ({"cudnn"} if changes == {"lengths": (32, 32)} else set()):
        assert refusal(kernel, changed)


def test_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_cudnn", lambda: 91800)
    assert "cudnn" in eligible(problem()) and "cudnn" not in eligible(problem(head_dim=192))
    monkeypatch.setattr(choice, "_cudnn", lambda: 0)
    assert "cudnn" not in eligible(problem())


def test_table_of_this_package() -> None:
    assert choose(problem()) == "gluon"
    assert choose(problem(head_dim=64, v_head_dim=64, lengths=(1024, 1024))) == "cudnn"
    assert choose(problem(head_dim=64, v_head_dim=64, lengths=(1024, 1024), pairs=1 << 25)) == "gluon"
    assert choose(problem(head_dim=64, v_head_dim=64)) == "gluon"
    assert choose(problem(head_dim=64, v_head_dim=64, softcap=True)) == "gluon"
    full = problem(band="full", square=False, lengths=(1024, 1024))
    assert choose(full) == "gluon"
    assert choose(full._replace(kind="bwd")) == "gluon"
    assert choose(full._replace(kind="bwd", deterministic=True)) == "gluon"
    assert choose(full._replace(kind="bwd", grad_lse=True)) == "gluon"
    latent = problem(kind="bwd", head_dim=192)
    assert choose(latent) == choose(latent._replace(kind="fwd", band="full", square=False)) == "cudnn"
    assert choose(latent._replace(pairs=1 << 25)) == "triton"
    assert choose(latent._replace(kind="fwd", lengths=(8192, 8192))) == "gluon"
    assert choose(latent._replace(deterministic=True)) == "triton"
    assert choose(latent._replace(v_head_dim=192)) == choose(latent._replace(head_dim=256, v_head_dim=256)) == "gluon"
    assert choose(problem(capability=80)) == "flash"
    assert choose(problem(capability=100)) == choose(problem(capability=100, kind="bwd")) == "cudnn"
    assert choose(problem(capability=120)) == "triton"


def test_rows_are_well_formed() -> None:
    for rows in choices.ROWS.values():
        for row in rows:
            assert row.kind in ("fwd", "bwd") and row.head_dim in (64, 128, 256)
            assert row.lengths[0] <= row.lengths[1] and set(row.kernels) <= set(KERNELS)
    assert all(set(names) <= set(KERNELS) for names in choices.ORDER.values())


def test_rows_decide_by_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("fwd", 128, "causal", (4096, 8191), ("flash",))
    monkeypatch.setattr(choices, "ROWS", {9: (row,)})
    assert choose(problem(head_dim=72, v_head_dim=72)) == "flash"
    others = (
        {"kind": "bwd"},
        {"head_dim": 64, "v_head_dim": 64},
        {"head_dim": 136, "v_head_dim": 136},
        {"band": "full"},
        {"lengths": (4096, 4095)},
        {"lengths": (4096, 8192)},
    )
    assert [choose(problem(**change)) for change in others] == ["gluon"] * len(others)


def test_forced_where_it_takes_the_problem() -> None:
    assert [choose(problem(), name) for name in KERNELS] == list(KERNELS)
    assert choose(problem(softcap=True), "cudnn") == "gluon"
    assert choose(problem(lengths=(0, 7)), "gluon") == "triton"


@pytest.mark.parametrize(
    ("mask", "lengths", "expected"),
    [
        (MaskSpec(), (8, 9), ("full", False)),
        (MaskSpec(None, 0), (8, 8), ("causal", True)),
        (MaskSpec(None, 0), (8, 9), ("causal", False)),
        (MaskSpec(None, 1), (9, 9), ("causal", False)),
        (MaskSpec(None, 8), (9, 9), ("full", False)),
        (MaskSpec(-7, 0), (8, 8), ("causal", True)),
        (MaskSpec(-6, 0), (8, 8), ("window", False)),
        (MaskSpec(-7, 7), (8, 8), ("full", False)),
    ],
)
def test_bands(mask: MaskSpec, lengths: tuple[int, int], expected: tuple[str, bool]) -> None:
    assert classify(mask, *lengths, same_length=lengths[0] == lengths[1]) == expected
    if mask.lower is not None:  # of a symbolic length a window is never known to hide nothing
        assert classify(mask, object(), object(), same_length=True) == ("window", False)


def test_of_site(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 8, 1024, 128)
    cuda = torch.device("cuda", 0)

    def of(spec: AttentionSpec) -> tuple[str, str]:
        return choice.of_site(spec, shape, shape, shape, BF16, cuda)

    assert of(AttentionSpec()) == ("triton", "triton")  # no such device here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "device_limits", lambda index: (90, None))
    assert of(AttentionSpec()) == ("gluon", "gluon")
    assert of(AttentionSpec(extras=("padding",))) == ("triton", "triton")
    with config.override(kernel="flash"):
        assert of(AttentionSpec()) == ("flash", "flash")


def test_names_are_checked() -> None:
    inputs = make_inputs()
    with pytest.raises(
        ValueError, match=r"kernel_name: expected one of triton, gluon, cudnn, flash, or None .* 'fast'"
    ):
        attn(*inputs, kernel_name="fast")
    out, lse = attn(*inputs)
    with pytest.raises(ValueError, match="kernel_name"):
        attn_backward(out, None, *inputs, out, lse, kernel_name="fast")
    with pytest.raises(ValueError, match="kernel: expected one of"):
        config.Config(kernel="fast")


def test_on_the_cpu_there_is_no_choice() -> None:
    inputs = make_inputs(requires_grad=True)
    for name in KERNELS:
        torch.testing.assert_close(attn(*inputs, kernel_name=name)[0], attn(*inputs)[0], rtol=0, atol=0)
    torch.library.opcheck(attn, inputs, {"kernel_name": "gluon"})


def test_the_backward_chooses_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = library._complete

    def complete(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
        seen.append((kind, options.get("kernel_name")))
        return original(kind, options)

    monkeypatch.setattr(library, "_complete", complete)
    inputs = make_inputs(q_len=29, requires_grad=True)  # a length of its own: nothing is prepared for it yet
    attn(*inputs, kernel_name="flash")[0].sum().backward()
    assert seen == [("fwd", "flash"), ("bwd", None)]


def test_passed_on_by_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = library._complete
    monkeypatch.setattr(library, "_complete", lambda kind, x: seen.append(x.get("kernel_name")) or original(kind, x))
    query, key, value = make_inputs(q_len=31)
    with torch.autocast("cpu", torch.bfloat16):
        attn(query, key, value, kernel_name="flash")
    stacked = [torch.stack([x, x]) for x in (query, key, value)]
    torch.vmap(lambda q, k, v: attn(q, k, v, kernel_name="cudnn"))(*stacked)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        attn(query, key, value, kernel_name="gluon", is_causal=True)
    assert counter.get_total_flops() > 0
    assert seen == ["flash", "cudnn", "gluon"]


def test_invalid_calls_are_never_taken_for_known_ones() -> None:
    query, key, value = make_inputs()
    attn(query, key, value)
    for _ in range(2):
        with pytest.raises(TypeError, match="value"):
            attn(query, key, value.double())
        with pytest.raises(ValueError, match="window_left"):
            attn(query, key, value, window_left=-1)
    assert attn(query, key, value)[0].shape == query.shape


class TestLaunch:
    """What is done around a kernel, with the CPU's op for the kernels."""

    @pytest.fixture(autouse=True)
    def _inputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty_strided(size: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            assert type(size) is type(strides) is tuple  # what the function for CUDA insists on
            return torch.empty_strided(size, strides, dtype=dtype)

        monkeypatch.setattr(cuda, "empty_strided", empty_strided)
        monkeypatch.setattr(hopper, "tile_counter", lambda device: torch.zeros(1, dtype=torch.int32))
        self.spec: dict[str, Any] = {"scale": 0.2, "mask": MaskSpec(None, 0), "softcap": None}
        self.inputs = make_inputs("bnhd", q_len=32, dtype=BF16)
        self.out, self.lse = attn(*self.inputs, scale=0.2, is_causal=True)
        self.saved = (torch.randn_like(self.out), None, *self.inputs, self.out, self.lse)
        self.grads = attn_backward(*self.saved, scale=0.2, is_causal=True)[:3]

    def triton(self, *tensors: Tensor) -> str:
        return "triton"

    def test_forward_of_aten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def contiguous(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
            assert is_causal and scale == 0.2
            return self.out.contiguous(), self.lse

        monkeypatch.setitem(aten.FORWARD, "flash", contiguous)
        call = cuda._forward("flash", self.triton, self.inputs[0], self.inputs[2], self.spec)
        out, lse = call(*self.inputs)
        assert out.stride() == self.inputs[0].stride() and torch.equal(out, self.out) and lse is self.lse
        assert call(*self.inputs[:2], self.misaligned(self.inputs[2])) == "triton"

    def misaligned(self, x: Tensor) -> Tensor:
        storage = torch.empty(x.numel() + 1, dtype=x.dtype)
        return storage[1:].as_strided(x.shape, x.stride())

    def test_forward_of_gluon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def write(query: Tensor, key: Tensor, value: Tensor, *given: Tensor, **numbers: Any) -> list[Any]:
            out, lse, _ = given
            assert numbers == self.spec and (lse.shape, lse.dtype) == (out.shape[:3], torch.float32)
            out.copy_(self.out)
            lse.copy_(self.lse)
            return []

        monkeypatch.setattr(hopper, "forward", write)
        call = cuda._forward("gluon", self.triton, self.inputs[0], self.inputs[2], self.spec)
        out, lse = call(*self.inputs)
        assert out.stride() == self.inputs[0].stride()
        assert torch.equal(out, self.out) and torch.equal(lse, self.lse)
        assert call(self.misaligned(self.inputs[0]), *self.inputs[1:]) == "triton"

    def test_backward_of_aten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def contiguous(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
            assert len(tensors) == 6 and is_causal and scale == 0.2
            return tuple(grad.contiguous() for grad in self.grads)

        monkeypatch.setitem(aten.BACKWARD, "flash", contiguous)
        call = cuda._backward("flash", self.triton, self.inputs, (True, False, True), self.spec)
        grad_query, grad_key, grad_value, grad_bias = call(*self.saved)
        assert grad_key.shape == grad_bias.shape == (0,)
        for grad, want in ((grad_query, self.grads[0]), (grad_value, self.grads[2])):
            assert torch.equal(grad, want) and grad.stride() == want.stride()
        assert call(self.misaligned(self.saved[0]), *self.saved[1:]) == "triton"

    def test_backward_of_gluon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = {**self.spec, "deterministic": True}

        def write(*tensors: Any, **given: Any) -> list[Any]:
            assert given == numbers and len(tensors) == 11 and tensors[1] is None
            for grad, want in zip(tensors[7:10], self.grads, strict=True):
                assert grad.stride() == want.stride()
                grad.copy_(want)
            return []

        monkeypatch.setattr(hopper_backward, "backward", write)
        call = cuda._backward("gluon", self.triton, self.inputs, (True, True, True), numbers)
        assert all(torch.equal(a, b) for a, b in zip(call(*self.saved), self.grads, strict=False))

    @pytest.mark.parametrize("kind", ["transposed", "shifted"])
    def test_lse_of_any_layout(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels are compiled for what the first call gave them, and later ones may come from anywhere."""
        lse = torch.randn(self.lse.numel() + 1)[1:].view(self.lse.shape)
        if kind == "transposed":
            lse = self.lse.mT.contiguous().mT
        assert not lse.is_contiguous() or lse.data_ptr() % 16
        seen: list[Tensor] = []
        monkeypatch.setattr(hopper_backward, "backward", lambda *tensors, **given: seen.extend(tensors) or [])
        call = cuda._backward("gluon", self.triton, self.inputs, (True,) * 3, {**self.spec, "deterministic": False})
        grad_out, _, *rest = self.saved
        call(grad_out, lse, *rest[:-1], lse)
        for found in (seen[1], seen[6]):
            assert found.is_contiguous() and found.data_ptr() % 16 == 0 and torch.equal(found, lse)

    def test_cudnn_without_a_plan(self, caplog: pytest.LogCaptureFixture) -> None:
        asked = []

        def no_plan(*tensors: Tensor) -> None:
            asked.append(tensors)
            raise RuntimeError("no plan")

        call = cuda._or(no_plan, self.triton, problem(), "cudnn")
        assert [call(*self.inputs), call(*self.inputs)] == ["triton"] * 2
        assert len(asked) == 1 and len(caplog.records) == 1 and "no plan" in caplog.text

    @pytest.mark.parametrize(
        ("capability", "works", "found"), [(90, True, "gluon"), (90, False, "triton"), (100, True, "triton")]
    )
    def test_what_computes_instead_of_cudnn(self, capability: int, works: bool, found: str) -> None:
        made = []

        def make(kernel: str) -> Any:
            made.append(kernel)

            def call(*tensors: Tensor) -> str:
                if kernel == "cudnn" or not works:
                    raise RuntimeError("no plan")
                return kernel

            return call

        call = cuda._or_next(make, self.triton, problem(capability=capability), "cudnn")
        assert [call(*self.inputs), call(*self.inputs)] == [found] * 2
        assert made == (["gluon", "cudnn"] if capability == 90 else ["cudnn"])

    def test_out_of_memory_is_no_missing_plan(self) -> None:
        def full(*tensors: Tensor) -> None:
            raise torch.OutOfMemoryError("full")

        with pytest.raises(torch.OutOfMemoryError):
            cuda._or(full, self.triton, problem(), "cudnn")(*self.inputs)

    @pytest.mark.parametrize(
        ("layout", "wide"), [("bhnd", True), ("packed", True), ("expanded", False), ("strided", False)]
    )
    def test_wide_rows(self, layout: str, wide: bool) -> None:
        assert all(map(cuda.has_wide_rows, make_inputs(layout, dtype=BF16))) == wide
        assert not cuda.has_wide_rows(make_inputs(head_dim=20, dtype=BF16)[0][..., :16])
