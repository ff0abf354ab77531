"""explain() and report(): the text, the data, and that looking changes nothing."""

import io
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from expecttest import TestCase
from rich.console import Console
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.report import compiled_sites

from .conftest import causal

report_module = sys.modules["flash_inductor.report"]  # the package has a function of that name


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
   why: dropout 1 of the probabilities
   fix: use a number from 0 to below 1""",
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
    assert after.graphs == before.graphs + 1 and "attention site" in str(after)


def test_rich_table() -> None:
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(flash_inductor.explain(two_kinds, *inputs()))
    text = console.export_text()
    assert "recognised as" in text and "causal" in text and "is_causal=True" in text and "dropout" in text


def test_rich_table_is_in_colour() -> None:
    console = Console(width=160, force_terminal=True, file=io.StringIO())
    console.print(flash_inductor.explain(two_kinds, *inputs()))
    assert "\x1b[32mATen CPU flash" in console.file.getvalue() and "\x1b[33mleft alone" in console.file.getvalue()


def test_show_prints_to_a_terminal_or_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = flash_inductor.explain(two_kinds, *inputs())
    monkeypatch.setenv("FORCE_COLOR", "")
    e.show()
    assert capsys.readouterr().out == f"{e}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes a terminal from
    monkeypatch.setenv("TERM", "xterm-256color")
    e.show()
    assert "ATen CPU flash" in (text := capsys.readouterr().out) and "\x1b[" in text


def test_picture_has_each_site_in_a_box(tmp_path: Path) -> None:
    e = flash_inductor.explain(two_kinds, *inputs())
    e.draw(tmp_path / "graph.dot")
    text = (tmp_path / "graph.dot").read_text()
    first, second = re.findall(r"cluster_\d \{(.*?)\n  \}", text, flags=re.S)
    assert "palegreen" in first and "ATen CPU flash" in first and "scaled_dot_product_attention [1, 2, 32, 16]" in first
    assert "khaki" in second and "left alone" in second
    assert text.count(" -> ") == 7  # q, k, v into the first; its result, k and v into the second; that to the output


def test_picture_of_a_chain_shows_all_that_is_replaced_and_little_else(tmp_path: Path) -> None:
    def chain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            v = v + 1
        return torch.softmax(q @ k.mT / 4.0, -1) @ v

    e = flash_inductor.explain(chain, *inputs())
    assert len(e.sites[0].nodes) == 5, e.sites[0].nodes  # product of the transposed keys, division, softmax, product
    counts = []
    for around in (2, None):
        e.draw(tmp_path / "graph.gv", around=around)
        counts.append((tmp_path / "graph.gv").read_text().count("[label="))
    assert counts[0] < 15 and counts[1] >= 20 + 3 + 5 + 1


def test_picture_drawn_by_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Graphviz's dot, which gets the text on stdin: CI has none."""
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\n[ $1 = -Tsvg ] && exec cat > $3\necho bad format >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    e = flash_inductor.explain(causal, *inputs())
    e.draw(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().startswith("digraph")
    with pytest.raises(RuntimeError, match="dot failed: bad format"):
        e.draw(tmp_path / "graph.png")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"needs Graphviz's program dot.*install Graphviz"):
        e.draw(tmp_path / "graph.svg")


def test_picture_errors_name_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a name that ends in \.dot, .*got 'graph.txt'"):
        flash_inductor.explain(causal, *inputs()).draw(tmp_path / "graph.txt")
    with pytest.raises(ValueError, match="no graph to draw"):
        flash_inductor.report().draw(tmp_path / "graph.dot")


def test_an_empty_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_compiled", [])
    monkeypatch.setattr(report_module, "_graphs", 0)
    assert "The plugin is off: call flash_inductor.enable()" in str(flash_inductor.report())
    with flash_inductor.enabled():
        assert "Nothing has been compiled with the plugin on" in str(flash_inductor.report())
        torch.compile(lambda x: x + 1)(torch.ones(2))
        assert str(flash_inductor.report()) == "flash_inductor: no attention found in 1 graph"


def test_reason_splits_into_cause_and_remedy() -> None:
    site = flash_inductor.Site("x", "sdpa", False, reason="it is odd; make it even; or leave it")
    assert (site.cause, site.remedy) == ("it is odd", "make it even; or leave it")
    assert flash_inductor.Site("x", "sdpa", True).remedy is None
    data = site.to_dict()
    assert (data["cause"], data["remedy"], data["nodes"]) == ("it is odd", "make it even; or leave it", [])


def test_torchs_own_switch_turns_the_log_on(run_python: Callable[..., str]) -> None:
    out = run_python(
        """
        import logging, flash_inductor
        print(*(logging.getLogger("flash_inductor").isEnabledFor(n) for n in (logging.INFO, logging.DEBUG)))
        """,
        TORCH_LOGS="flash_inductor",
    )
    assert out.split() == ["True", "False"]


def test_each_site_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with flash_inductor.enabled(), caplog.at_level(logging.DEBUG, "flash_inductor"):
        torch.compile(lambda x: x + 1)(torch.ones(2))
        torch.compile(causal)(*inputs())
    lines = [r.getMessage().partition("] ")[2] for r in caplog.records if r.name == "flash_inductor"]
    assert lines[:2] == ["no attention found", "1 of 1 attention sites replaced"]
    assert lines[2].startswith("sdpa at conftest.py:") and "causal, as ATen CPU flash" in lines[2]
