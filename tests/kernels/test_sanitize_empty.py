"""The kernels of ``tests/gpu/sanitize.py --empty`` compiled for sm_90a: split by warps, and as empty as they say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from .pretend import compile_for_hopper


@pytest.mark.parametrize(("name", "barriers"), [("stores", 0), ("handshake", 2)])
def test_compiles(name: str, barriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    empty = importlib.import_module("sanitize_empty")
    compiled = compile_for_hopper(empty.KERNELS[name], (torch.zeros(3, dtype=torch.int32), 7), empty.OPTIONS)
    ttgir, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
    assert "ttg.warp_specialize" in ttgir and "setmaxnreg" in ptx
    assert ttgir.count("ttg.local_alloc") == ptx.count("mbarrier.init") == barriers
    assert not any(work in ttgir for work in ("ttg.local_store", "ttg.local_load", "convert_layout"))
