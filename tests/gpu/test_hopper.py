"""The Hopper forward on an H100 or its like, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_inductor.ops import hopper
from flash_inductor.ops.layout import empty_like_layout
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 40), (160, 160), (64, 128))
_FEATURES: dict[str, tuple[dict[str, Any], MaskSpec, float | None]] = {
    # name: (sizes, band, softcap)
    "full": ({"q_len": 512}, MaskSpec(), None),
    "full_ragged": ({"q_len": 333, "kv_len": 519}, MaskSpec(), None),
    "causal": ({"q_len": 1000, "heads": 6, "kv_heads": 2}, MaskSpec(upper=0), None),
    "causal_long": ({"q_len": 9000, "batch": 1}, MaskSpec(upper=0), None),
    "bottom_right": ({"q_len": 300, "kv_len": 777}, MaskSpec(upper=477), None),
    "more_queries": ({"q_len": 700, "kv_len": 200}, MaskSpec(upper=-500), None),
    "one_query": ({"q_len": 1, "kv_len": 777}, MaskSpec(upper=776), None),
    "window": ({"q_len": 1000}, MaskSpec(-300, 0), None),
    "window_narrow": ({"q_len": 600}, MaskSpec(-127, 0), None),
    "window_both": ({"q_len": 600, "kv_len": 500}, MaskSpec(-64, 64), None),
    "window_bottom_right": ({"q_len": 300, "kv_len": 900}, MaskSpec(500, 600), None),
    "left_only": ({"q_len": 500, "kv_len": 600}, MaskSpec(lower=-100), None),
    "blind_rows": ({"q_len": 600, "kv_len": 100}, MaskSpec(-45, -35), None),
    "all_blind": ({"q_len": 100, "kv_len": 100}, MaskSpec(100, 120), None),
    "softcap": ({"q_len": 700, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), 20.0),
    "softcap_window": ({"q_len": 700, "heads": 4, "kv_heads": 2}, MaskSpec(-200, 0), 50.0),
}


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: MaskSpec, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = empty_like_layout(query, (*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    assert hopper.takes("fwd", query.shape[3], value.shape[3], query.dtype, 90, None)
    assert hopper.aligned(query, key, value, out)
    counter = hopper.tile_counter(query.device.index)
    scale = query.shape[3] ** -0.5
    for launch in hopper.forward(query, key, value, out, lse, counter, scale=scale, mask=mask, softcap=softcap):
        launch()
    return out, lse


def _check(sizes: dict[str, Any], mask: MaskSpec, softcap: float | None, dtype: torch.dtype, layout: str) -> None:
    inputs = make_inputs(layout, **{"heads": 2, **sizes}, dtype=dtype, device="cuda")
    assert_close_to_reference(_run(*inputs, mask, softcap), *inputs, AttentionSpec(None, mask, softcap))


@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("feature", ["causal", "full_ragged", "window"])
def test_head_dims(feature: str, dims: tuple[int, int]) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check({**sizes, "head_dim": dims[0], "v_head_dim": dims[1]}, mask, softcap, torch.bfloat16, "bnhd")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("feature", _FEATURES)
def test_features(feature: str, dim: int) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check({**sizes, "head_dim": dim}, mask, softcap, torch.bfloat16, "bhnd")


@pytest.mark.parametrize("feature", ["full", "causal", "softcap", "window_both"])
def test_fp16(feature: str) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check({**sizes, "head_dim": 128}, mask, softcap, torch.float16, "bnhd")


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "nbhd", "packed", "sliced"])
def test_layouts(layout: str) -> None:
    _check({"q_len": 200, "head_dim": 64}, MaskSpec(upper=0), None, torch.bfloat16, layout)


def test_what_nobody_sees_does_not_leak() -> None:
    query, key, value = make_inputs(q_len=300, kv_len=900, head_dim=64, dtype=torch.bfloat16, device="cuda")
    key[:, :, 520:], value[:, :, 520:] = torch.nan, torch.inf
    key[:, :, :100], value[:, :, :100] = torch.nan, torch.inf
    mask = MaskSpec(100, 220)
    got = _run(query, key, value, mask)
    assert_close_to_reference(got, query, key, value, AttentionSpec(None, mask))


def test_repeats_bit_for_bit() -> None:
    """Also when tiles are computed by other multiprocessors: their order depends on a counter."""
    for mask in (MaskSpec(upper=0), MaskSpec(-500, 0)):
        inputs = make_inputs("bnhd", q_len=3000, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
        out, lse = _run(*inputs, mask)
        for _ in range(20):
            again = _run(*inputs, mask)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_streams_at_once() -> None:
    """Each stream has a counter of its own."""
    problems = [
        (make_inputs("bnhd", q_len=n, heads=16, head_dim=128, dtype=torch.bfloat16, device="cuda", seed=n), mask)
        for n, mask in ((2000, MaskSpec(upper=0)), (1500, MaskSpec()))
    ]
    expected = [_run(*inputs, mask) for inputs, mask in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for _ in range(20):
        for i, (inputs, mask) in enumerate(problems):
            with torch.cuda.stream(streams[i]):
                found[i].append(_run(*inputs, mask))
    torch.cuda.synchronize()
    for want, results in zip(expected, found, strict=True):
        for got in results:
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_graphs_replayed_at_once() -> None:
    problems = []
    for n in (2000, 1500):
        inputs = make_inputs("bnhd", q_len=n, heads=16, head_dim=128, dtype=torch.bfloat16, device="cuda", seed=n)
        want = _run(*inputs, MaskSpec(upper=0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = _run(*inputs, MaskSpec(upper=0))
        problems.append((graph, torch.cuda.Stream(), inputs, want, got))
    for _ in range(5):
        for *_, got in problems:
            got[0].zero_()
        torch.cuda.synchronize()
        for graph, stream, *_ in problems:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for *_, want, got in problems:
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", ["heads", "rows"])
def test_offsets_beyond_32_bits(layout: str) -> None:
    """Views whose last head or last rows start more than 2**31 elements into the storage (4.3 GiB of bfloat16)."""
    length, dim, stride = 256, 64, (1 << 31) + 4096
    storage = torch.zeros(stride + 65_536 * 2, dtype=torch.bfloat16, device="cuda")
    if layout == "heads":
        x = storage.as_strided((1, 2, length, dim), (stride * 2, stride, dim, 1))
    else:
        row = (stride // (length - 1)) // 8 * 8 + 8
        x = storage.as_strided((1, 1, length, dim), (stride, stride, row, 1))
    small = torch.randn(x.shape, device="cuda", dtype=torch.bfloat16)
    x.copy_(small)
    got, want = (_run(y, y, y, MaskSpec(upper=0)) for y in (x, small))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_more_heads_than_a_grid_axis_holds() -> None:
    _check({"batch": 70_000, "heads": 1, "q_len": 3, "head_dim": 16}, MaskSpec(), None, torch.float16, "bhnd")
