"""Which configurations compete, and that a bad one doesn't take the compile with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from fakecuda import ARCHS, lower
from harness import qkv
from torch import Tensor
from torch._inductor import select_algorithm

from flash_inductor import override
from flash_inductor._compat import inductor
from flash_inductor.kernels.configs import configs, shared_memory_bytes
from flash_inductor.lowering import choices
from flash_inductor.ops import triton_kernels as eager

MEASURE = {"max_autotune": True, "search_autotune_cache": False}


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.flashbwd.attn(query, key, value, is_causal=True)[0]


def inputs() -> list[Tensor]:
    return qkv(q_len=128, dim=64, dtype=torch.bfloat16)


@contextmanager
def stubbed_benchmark() -> Iterator[dict[str, list[Any]]]:
    """Nothing can be timed here: pretend that the last choice is the fastest, and note what was offered."""
    offered: dict[str, list[Any]] = {}

    def lookup(self: Any, choices: list[Any], name: str, *args: Any, **kwargs: Any) -> dict[Any, float]:
        offered[name] = list(choices)
        return {choice: float(len(choices) - i) for i, choice in enumerate(choices)}

    cache = select_algorithm.AlgorithmSelectorCache
    with (
        mock.patch.object(cache, "lookup", lookup),
        mock.patch.object(cache, "make_precompile_fn", lambda *args, **kwargs: lambda: None),
    ):
        yield offered


def blocks(code: str) -> list[tuple[int, int, int, int]]:
    """(BLOCK_M, BLOCK_N, warps, stages) of each template kernel."""
    found = []
    for kernel in harness.interp.kernel_sources(code):
        if kernel.is_template:
            m, n = (int(kernel.body.split(f"BLOCK_{x} : tl.constexpr = ")[1].split()[0]) for x in "MN")
            found.append((m, n, kernel.num_warps, kernel.num_stages))
    return found


def test_the_first_of_the_table_without_autotuning() -> None:
    lowered = lower(causal, inputs())
    limit = ARCHS["sm90"].shared_memory
    assert blocks(lowered.text) == [configs(kind, 90, 64, 64, 2, limit)[0] for kind in ("fwd", "dq", "dkdv")]


def test_all_of_the_table_is_measured_and_the_fastest_taken() -> None:
    with stubbed_benchmark() as offered:
        lowered = lower(causal, inputs(), **MEASURE)
    tables = {
        f"flashbwd_{name}": configs(kind, 90, 64, 64, 2, ARCHS["sm90"].shared_memory)
        for name, kind in (("forward", "fwd"), ("grad_query", "dq"), ("grad_key_value", "dkdv"))
    }
    assert {name: len(found) for name, found in offered.items()} == {name: len(t) for name, t in tables.items()}
    assert all(len(table) > 1 for table in tables.values())
    assert blocks(lowered.text) == [table[-1] for table in tables.values()]


def test_what_asks_for_too_much_shared_memory_is_left_out() -> None:
    with stubbed_benchmark() as offered:
        lower(causal, qkv(q_len=128, dim=128, dtype=torch.bfloat16), arch="sm80", **MEASURE)
    limit = ARCHS["sm80"].shared_memory
    assert all(
        shared_memory_bytes("fwd", config, 128, 128, 2, 80) <= limit
        for config in configs("fwd", 80, 128, 128, 2, limit)
    )
    with mock.patch.dict(ARCHS, sm80=harness.fakecuda.Arch("small", 8, 0, 46, 40_000)):
        eager.device_limits.cache_clear()
        small = lower(causal, qkv(q_len=128, dim=128, dtype=torch.bfloat16), arch="sm80")
    for found, kind in zip(blocks(small.text), ("fwd", "dq", "dkdv"), strict=True):
        assert shared_memory_bytes(kind, eager.Config(*found), 128, 128, 2, 80) <= 40_000
    assert len(offered) == 3


def failing_for(bad: Any) -> Any:
    """maybe_append_choice that fails for the configurations ``bad`` says."""
    original = select_algorithm.TritonTemplate.maybe_append_choice

    def append(self: Any, choices: list[Any], **kwargs: Any) -> Any:
        if bad(kwargs):
            raise RuntimeError("can't be rendered")
        return original(self, choices, **kwargs)

    return mock.patch.object(select_algorithm.TritonTemplate, "maybe_append_choice", append)


def test_a_choice_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    first = configs("fwd", 90, 64, 64, 2, ARCHS["sm90"].shared_memory)[0]
    with stubbed_benchmark() as offered, failing_for(lambda kw: (kw["BLOCK_M"], kw["BLOCK_N"]) == first[:2]):
        lowered = lower(causal, inputs(), **MEASURE)
    assert "can't be rendered" in caplog.text
    assert 0 < len(offered["flashbwd_forward"]) < len(configs("fwd", 90, 64, 64, 2))
    assert len(blocks(lowered.text)) == 3


def test_without_any_choice_the_op_is_called() -> None:
    with failing_for(lambda kw: True):
        lowered = lower(causal, inputs())
    assert "torch.ops.flashbwd.attn.default(" in lowered.codes[0]
    assert "torch.ops.flashbwd.attn_backward.default(" in lowered.codes[1]


def test_where_no_choice_can_be_compiled_the_op_is_called(caplog: pytest.LogCaptureFixture) -> None:
    def lookup(self: Any, choices: list[Any], *args: Any, **kwargs: Any) -> dict[Any, float]:
        return dict.fromkeys(choices, float("inf"))  # what Inductor notes for a choice that Triton can't compile

    with stubbed_benchmark(), mock.patch.object(select_algorithm.AlgorithmSelectorCache, "lookup", lookup):
        lowered = lower(causal, inputs(), **MEASURE)
    assert "torch.ops.flashbwd.attn.default(" in lowered.codes[0]
    assert "torch.ops.flashbwd.attn_backward.default(" in lowered.codes[1]
    assert "flashbwd_forward: the op is called instead" in caplog.text


def test_written_inputs_are_known_to_the_chosen_kernel() -> None:
    """With a deferred choice Inductor forgets them, and the backward would read an lse that is never written."""
    with stubbed_benchmark() as offered:
        lower(causal, inputs(), **MEASURE)
    assert [len(c.mutated_inputs) for c in offered["flashbwd_forward"]] == [1] * len(offered["flashbwd_forward"])
    assert all(c.mutated_inputs for c in offered["flashbwd_grad_key_value"])


@pytest.mark.parametrize("returned", [lambda box: box, lambda box: (box, "choice")])
def test_both_ways_autotuning_returns(returned: Any) -> None:
    with mock.patch.object(inductor, "autotune_select_algorithm", lambda *args, **kwargs: returned("box")):
        assert inductor.select("name", ["choice"], [], None) == "box"


def test_a_template_can_be_loaded_twice() -> None:
    assert choices.load_template("forward", choices.query_grid) is choices.load_template("forward", choices.query_grid)


def test_tiles_of_the_users_own() -> None:
    tiles = {"fwd": {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 1}, "dkdv": {"block_n": 128}}
    limit = ARCHS["sm90"].shared_memory
    with override(kernel_options=tiles):
        lowered = lower(causal, inputs())
        with stubbed_benchmark() as offered:
            lower(causal, inputs(), **MEASURE)
    dq, dkdv = (configs(kind, 90, 64, 64, 2, limit)[0] for kind in ("dq", "dkdv"))
    assert blocks(lowered.text) == [(32, 16, 2, 1), dq, dkdv._replace(block_n=128)]
    assert "flashbwd_forward" not in offered or len(offered["flashbwd_forward"]) == 1
    assert len(offered["flashbwd_grad_query"]) > 1
