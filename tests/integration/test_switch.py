"""enable, disable, enabled, compose: who sees the switch, and that the user's own passes stay."""

import logging
import threading

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

import flash_inductor
from flash_inductor.matching import fusion_pass
from flash_inductor.report import Site, collect

from .conftest import causal

TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


def sites_of(fn=causal, **options) -> list[Site]:
    """Compile anew and run; the sites that our pass saw."""
    torch._dynamo.reset()
    with collect() as sites:
        torch.compile(fn, **options)(*(torch.randn(1, 2, 32, 16) for _ in range(3)))
    return sites


def test_nothing_is_rewritten_before_enable() -> None:
    assert not flash_inductor.is_enabled()
    assert sites_of() == []


def test_enable_and_disable() -> None:
    flash_inductor.enable()
    assert flash_inductor.is_enabled()
    assert [s.replaced for s in sites_of()] == [True]
    flash_inductor.disable()
    assert not flash_inductor.is_enabled()
    assert sites_of() == []


def test_enable_twice_rewrites_once() -> None:
    flash_inductor.enable()
    flash_inductor.enable()
    assert len(sites_of()) == 1
    flash_inductor.disable()
    assert sites_of() == []


def test_enabled_puts_the_switch_back_also_after_an_error() -> None:
    with pytest.raises(KeyError), flash_inductor.enabled():
        assert len(sites_of()) == 1
        raise KeyError
    assert not flash_inductor.is_enabled()
    flash_inductor.enable()
    with flash_inductor.enabled():
        pass
    assert flash_inductor.is_enabled()


def test_disable_leaves_no_trace_in_the_config() -> None:
    before = inductor_config.get_config_copy()
    flash_inductor.enable()
    during = inductor_config.get_config_copy()
    flash_inductor.disable()
    after = inductor_config.get_config_copy()
    assert during["pre_grad_custom_pass"] is not None
    assert {k: v for k, v in after.items() if v != before[k]} == {}


def test_results_after_disable_are_stocks_bit_for_bit(qkv) -> None:
    stock = torch.compile(causal)(*qkv)
    grads = torch.autograd.grad(stock.sum(), qkv)
    with flash_inductor.enabled():
        torch._dynamo.reset()
        torch.compile(causal)(*qkv).sum().backward()
    torch._dynamo.reset()
    again = torch.compile(causal)(*qkv)
    assert torch.equal(stock, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(again.sum(), qkv), strict=True))


def test_pitfall_2_another_thread_sees_the_switch() -> None:
    """Inductor's config is thread-local since torch 2.12: a value assigned in one thread is not seen in another."""
    seen: list[list[bool]] = []

    def work() -> None:
        seen.append([s.replaced for s in sites_of()])

    for _ in range(2):
        for flip in (flash_inductor.enable, flash_inductor.disable):
            flip()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert seen == [[True], [], [True], []]


def test_a_switch_flipped_in_a_thread_is_seen_here() -> None:
    thread = threading.Thread(target=flash_inductor.enable)
    thread.start()
    thread.join()
    assert len(sites_of()) == 1


class UsersPass(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> str:
        return "a user's pass"

    def __reduce__(self):
        return str, (self.uuid(),)


@pytest.mark.parametrize("kind", ["callable", "pass with uuid", pytest.param("list", id="list")])
def test_a_users_own_pass_keeps_running_after_ours(kind: str) -> None:
    if kind == "list" and not TAKES_LISTS:
        pytest.skip("torch < 2.13 takes one pass")
    users = UsersPass()
    value = {"callable": lambda graph: users(graph), "pass with uuid": users, "list": [users, lambda graph: None]}[kind]
    inductor_config.pre_grad_custom_pass = value
    flash_inductor.enable()
    assert len(sites_of()) == 1
    assert len(users.seen) == 1 and "flashbwd.attn.default" in users.seen[0]
    flash_inductor.disable()
    assert inductor_config.pre_grad_custom_pass == (tuple(value) if kind == "list" else value)
    assert sites_of() == []
    assert len(users.seen) == 2


def test_compose_runs_ours_then_the_users(caplog) -> None:
    users = UsersPass()
    flash_inductor.enable()
    inductor_config.pre_grad_custom_pass = flash_inductor.compose(users)
    assert len(sites_of()) == 1 and "flashbwd.attn.default" in users.seen[0]
    flash_inductor.disable()
    assert sites_of() == [] and len(users.seen) == 2
    assert "compose" not in caplog.text


def test_compose_for_one_compile() -> None:
    users = UsersPass()
    flash_inductor.enable()
    assert len(sites_of(options={"pre_grad_custom_pass": flash_inductor.compose(users)})) == 1
    assert len(users.seen) == 1
    assert len(sites_of()) == 1 and len(users.seen) == 1


def test_a_pass_set_after_enable_replaces_ours_and_is_warned_of_once(caplog) -> None:
    flash_inductor.enable()
    inductor_config.pre_grad_custom_pass = UsersPass()
    assert sites_of() == []
    assert sites_of(lambda q, k, v: causal(q, k, v) + 1) == []
    assert caplog.text.count("flash_inductor.compose(your_pass)") == 1


@pytest.mark.skipif(not hasattr(inductor_config, "pre_grad_pass_timing"), reason="torch 2.11 has no such option")
def test_nothing_is_rewritten_where_passes_run_only_on_a_cache_miss(caplog) -> None:
    flash_inductor.enable()
    with inductor_config.patch(pre_grad_pass_timing="late"):
        assert sites_of() == []
    assert "pre_grad_pass_timing" in caplog.text
    assert len(sites_of()) == 1


def test_a_post_grad_pass_set_after_import_does_not_push_out_the_key(qkv) -> None:
    inductor_config.post_grad_custom_pre_pass = UsersPass()
    flash_inductor.enable()
    assert len(sites_of()) == 1
    from flash_inductor._compat import hooks

    first, second = hooks.passes_in_force("post_grad_custom_pre_pass")
    assert first is fusion_pass.KEY and isinstance(second, UsersPass) and second.seen


def break_half_way(graph: torch.fx.Graph, *, apply: bool = True, outer: object = None) -> list[Site]:
    """Damages the graph, then fails."""
    from flash_inductor.report import record

    attention = next(n for n in graph.nodes if "scaled_dot_product" in str(n.target))
    record(Site(node=attention.name, form="sdpa", replaced=True))
    attention.replace_all_uses_with(attention.args[0])
    graph.erase_node(attention)
    raise ZeroDivisionError("an error of ours")


def test_an_error_of_ours_does_not_break_the_compile(monkeypatch, caplog, qkv) -> None:
    monkeypatch.setattr("flash_inductor.matching.rewrite.rewrite_graph", break_half_way)
    flash_inductor.enable()
    with flash_inductor.override(strict=False), collect() as sites:
        out = torch.compile(causal)(*qkv)
        torch._dynamo.reset()
        torch.compile(causal)(*qkv)
    torch.testing.assert_close(out, causal(*qkv))
    assert sites == []
    assert caplog.text.count("internal error") == 1 and "please report" in caplog.text
    assert "an error of ours" in caplog.text


def test_strict_raises_an_error_of_ours(monkeypatch, qkv) -> None:
    monkeypatch.setattr("flash_inductor.matching.rewrite.rewrite_graph", break_half_way)
    flash_inductor.enable()
    with pytest.raises(Exception, match="an error of ours"):
        torch.compile(causal)(*qkv)


def test_one_line_is_logged_for_a_graph(caplog) -> None:
    flash_inductor.enable()
    with caplog.at_level(logging.INFO, "flash_inductor"):
        sites_of()
        with flash_inductor.override(log_sites=True):
            sites_of()
    lines = [record.getMessage() for record in caplog.records if record.name == "flash_inductor"]
    assert lines[0] == lines[1] == "[0/0] 1 of 1 attention sites replaced"
    assert len(lines) == 3 and "sdpa at conftest.py:" in lines[2] and "causal" in lines[2]


def test_import_is_cheap_and_enable_may_come_before_inductor(run_python) -> None:
    out = run_python("""
        import sys, torch
        import flash_inductor
        flash_inductor.enable()
        print([m for m in ("torch._inductor", "torch._dynamo", "torch._inductor.config") if m in sys.modules])
        import torch._dynamo
        from flash_inductor._compat import hooks
        passes = hooks.passes_in_force("pre_grad_custom_pass")
        print(*(type(p).__name__ for p in passes), "flash_inductor" in torch._dynamo.list_backends())
    """)
    assert out.splitlines() == ["[]", "FusionPass True"]
