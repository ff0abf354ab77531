"""Calls of generated code, which know what computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_inductor import config
from flash_inductor.ops import attn, library
from flash_inductor.testing import make_inputs

BF16 = torch.bfloat16


class TestSite:
    """A call of generated code: prepared once, again where a setting changed."""

    def site(self, kind: Any) -> library.Site:
        self.prepared: list[dict[str, Any]] = []

        def prepare(kind: Any, tensors: Any, options: dict[str, Any]) -> Any:
            self.prepared.append(options)
            return lambda *tensors: tensors[:2] if kind == "fwd" else tensors[:4]

        return library.Site(library._Calls(kind, prepare))

    def test_prepares_once(self) -> None:
        site, first, second = self.site("fwd"), make_inputs(dtype=BF16), make_inputs(dtype=BF16)
        for inputs in (first, second):
            assert [a is b for a, b in zip(site(*inputs, is_causal=True), inputs, strict=False)] == [True] * 2
        assert len(self.prepared) == 1 and self.prepared[0]["is_causal"] and self.prepared[0]["scale"] is None

    def test_settings_count(self) -> None:
        site, inputs = self.site("fwd"), make_inputs(dtype=BF16)
        site(*inputs)
        with config.override(kernel="triton"):
            site(*inputs)
            site(*inputs)
        assert len(self.prepared) == 2
        torch.use_deterministic_algorithms(True)
        try:
            site(*inputs)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(self.prepared) == 3

    def test_a_backward_has_five_results(self) -> None:
        query, key, value = make_inputs(dtype=BF16)
        out, lse = attn(query, key, value)
        grads = self.site("bwd")(out, None, query, key, value, out, lse, grad_mask=[True, True, False, False, False])
        assert len(grads) == 5
        assert self.prepared[0]["grad_mask"] == (True, True, False, False, False)

    def test_arguments_are_checked(self) -> None:
        query, key, value = make_inputs(dtype=BF16)
        with pytest.raises(ValueError, match="softcap"):
            self.site("fwd")(query, key, value, softcap=-1.0)
