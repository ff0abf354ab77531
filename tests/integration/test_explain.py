"""explain() and report(): the text, the data, and that looking changes nothing."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.report import compiled_sites

from .conftest import causal


def two_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(x, k, v, dropout_p=1.0)


def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = F.scaled_dot_product_attention(q, k, v, scale=0.5)
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(x, k, v)


def inputs(length: int = 32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, length, 16) for _ in range(3))


def text_of(explanation: flash_inductor.Explanation) -> str:
    """The text without line numbers and without the widths of columns, which depend on them."""
    return re.sub(r"(?<=\S)  +", "  ", re.sub(r"(\.py:|_at_)\d+", r"\1N", str(explanation)))


class TestText(TestCase):
    def test_replaced_and_left_alone(self) -> None:
        self.assertExpectedInline(
            text_of(flash_inductor.explain(two_kinds, *inputs())),
            """\
flash_inductor: 1 of 2 attention sites replaced in 1 graph

#  where  form  recognised as  kernel
1  test_explain.py:N in two_kinds  sdpa  causal  ATen CPU flash
   x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
2  test_explain.py:N in two_kinds  sdpa  -  left alone
   return F.scaled_dot_product_attention(x, k, v, dropout_p=1.0)
   why: dropout 1 of the probabilities; a number from 0 to below 1 is needed""",
        )

    def test_graph_break(self) -> None:
        self.assertExpectedInline(
            text_of(flash_inductor.explain(broken, *inputs())),
            """\
flash_inductor: 2 of 2 attention sites replaced in 2 graphs, 1 graph break

#  where  form  recognised as  kernel
1  test_explain.py:N in broken  sdpa  full, scale 0.5  ATen CPU flash
   x = F.scaled_dot_product_attention(q, k, v, scale=0.5)
2  test_explain.py:N in torch_dynamo_resume_in_broken_at_N  sdpa  full  ATen CPU flash
   return F.scaled_dot_product_attention(x, k, v)

graph break: Call to `torch._dynamo.graph_break()`
What runs between two graphs is not seen, and attention cut in two by a break is not recognised.""",
        )

    def test_no_attention(self) -> None:
        text = text_of(flash_inductor.explain(nn.Linear(4, 4), torch.ones(1, 4)))
        self.assertExpectedInline(text, """flash_inductor: no attention found in 1 graph""")


def test_data() -> None:
    e = flash_inductor.explain(two_kinds, *inputs())
    assert (len(e.sites), e.replaced, e.graphs, e.graph_breaks) == (2, 1, 1, ())
    data = json.loads(json.dumps(e.to_dict()))
    assert (data["replaced"], data["left_alone"], data["graphs"], data["graph_breaks"]) == (1, 1, 1, [])
    first, second = data["sites"]
    assert first["recognised_as"] == "causal" and first["kernel"] and first["reason"] is None
    assert Path(__file__).name in first["location"] and "is_causal=True" in first["source"]
    assert second["replaced"] is False and "dropout" in second["reason"]


def test_keyword_arguments_and_checkpoint_bodies() -> None:
    def run(x: torch.Tensor, *, other: torch.Tensor) -> torch.Tensor:
        return checkpoint(causal, x, other, other, use_reentrant=False)

    q, k, _ = inputs()
    assert flash_inductor.explain(run, q, other=k).replaced == 1


def test_nothing_is_replaced_compiled_or_counted() -> None:
    counters["stats"]["mine"] = 7
    before = len(compiled_sites())
    for on in (False, True):
        with flash_inductor.enabled() if on else flash_inductor.override():
            assert flash_inductor.explain(causal, *inputs()).replaced == 1
            assert flash_inductor.is_enabled() is on
    assert len(compiled_sites()) == before
    assert {name: dict(c) for name, c in counters.items() if c} == {"stats": {"mine": 7}}


def test_the_sizes_seen_by_explain_do_not_make_later_compiles_dynamic() -> None:
    flash_inductor.explain(causal, *inputs(32))
    graphs = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch.compile(causal, backend=keep)(*inputs(48))
    sizes = [n.meta["example_value"].shape[2] for n in graphs[0].graph.find_nodes(op="placeholder")]
    assert all(type(size) is int for size in sizes), sizes


def test_compiled_code_stays_compiled() -> None:
    compiled = torch.compile(causal)
    args = inputs()
    compiled(*args)
    frames = counters["stats"]["unique_graphs"]
    for _ in range(12):  # more often than Dynamo recompiles one function
        assert flash_inductor.explain(compiled, *args).replaced == 1
    compiled(*args)
    assert counters["stats"]["unique_graphs"] == frames


def test_a_module_compiled_in_place() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return causal(q, k, v)

    model = Attention()
    model.compile()
    compiled_call = model._compiled_call_impl
    assert flash_inductor.explain(model, *inputs()).replaced == 1
    assert model._compiled_call_impl is compiled_call


def test_the_models_own_error_comes_through() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        flash_inductor.explain(causal, torch.ones(1))
    with pytest.raises(TypeError, match="model: expected a module or function, got int"):
        flash_inductor.explain(3)


def test_report_has_what_was_compiled() -> None:
    before = flash_inductor.report()
    with flash_inductor.enabled():
        torch.compile(two_kinds)(*inputs())
    after = flash_inductor.report()
    assert after.sites[: len(before.sites)] == before.sites
    assert [s.replaced for s in after.sites[len(before.sites) :]] == [True, False]
    assert after.graphs is None and "attention site" in str(after)


def test_rich_table() -> None:
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(flash_inductor.explain(two_kinds, *inputs()))
    text = console.export_text()
    assert "recognised as" in text and "causal" in text and "is_causal=True" in text and "dropout" in text
