"""A decoding step on a GPU is left to the stock kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from site_helpers import capture, qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_inductor.matching.rewrite import rewrite_graph


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def eager(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def on_cuda(gm: torch.fx.GraphModule) -> torch.fx.Graph:
    with FakeTensorMode():
        for node in gm.graph.nodes:
            known = node.meta.get("example_value")
            if isinstance(known, torch.Tensor):
                moved = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="cuda")
                node.meta["example_value"] = moved
    return gm.graph


@pytest.mark.parametrize("fn", [sdpa, eager])
@pytest.mark.parametrize(("device", "q_len", "replaced"), [("cuda", 1, False), ("cuda", 2, True), ("cpu", 1, True)])
def test_one_query(fn, device: str, q_len: int, replaced: bool) -> None:
    gm = capture(fn, *qkv(q_len=q_len, kv_len=12))
    (site,) = rewrite_graph(on_cuda(gm) if device == "cuda" else gm.graph)
    assert site.replaced is replaced, site.reason
    assert replaced or "decoding step" in str(site.reason)
