"""attn_implementation="flash_inductor" against eager attention: logits, loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

import flash_inductor
from flash_inductor.integrations import transformers as integration
from flash_inductor.integrations.transformers import attention_forward, attention_mask
from flash_inductor.reference import attention_forward as exact_attention

from .models import DECODERS, ENCODER, assert_close, batch, decoders, losses_and_gradients, pair

KINDS = ("plain", "right", "left", "packed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of each call of ``flash_inductor.attention``."""
    made: list[dict[str, Any]] = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return flash_inductor.attention(*args, **kwargs)

    monkeypatch.setattr(integration, "attention", attention)
    yield made


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, kind: str, calls: list[dict[str, Any]]) -> None:
    eager, ours = decoders(name)
    inputs = batch(kind)
    assert_close(losses_and_gradients(eager, inputs), losses_and_gradients(ours, inputs))
    assert len(calls) == 2
    for i, call in enumerate(calls):
        chunks, documents = (
            name == "llama4" and i == 0,
            kind == "packed" and name != "gpt_oss",
        )  # it doesn't look for them
        if chunks and documents:
            continue  # two kinds of segments: a dense mask
        assert call["is_causal"] and (call["query_segments"] is not None) == (chunks or documents)
        assert (call["mask"] is not None) == (kind in ("left", "right"))
        assert call["mask"] is None or call["mask"].shape == (2, 1, 1, 14)
    window = {"mistral": 4, "gemma2": 4, "gemma3": 4, "gpt_oss": 4}.get(name)
    assert calls[0]["window_size"][0] == window
    assert (calls[0]["softcap"] is not None) == (name == "gemma2")
    assert (calls[0]["sinks"] is not None) == (name == "gpt_oss")


def masks_in(graph_modules: list[torch.fx.GraphModule]) -> list[list[Any]]:
    """Of each attention call in the graphs: the sizes of its tensors after query, key and value, and its options."""
    found = []
    for module in graph_modules:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.flashbwd.attn.default):
            sizes = [list(x.meta["val"].shape) for x in tree_leaves(node.args[3:]) if isinstance(x, torch.fx.Node)]
            found.append([sizes, dict(node.kwargs)])
    return found


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize(("name", "kind"), [("mistral", "packed"), ("gpt_oss", "right")])
def test_compiled(name: str, kind: str) -> None:
    """In one graph, and what the graph holds is the structure: no tensor grows with the square of the length."""
    eager, ours = decoders(name, layers=1, experts="batched_mm")
    inputs = batch(kind)
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    compiled = torch.compile(
        ours, backend=aot_autograd(fw_compiler=lambda module, _: make_boxed_func(keep(module))), fullgraph=True
    )
    expected, got = losses_and_gradients(eager, inputs), losses_and_gradients(compiled, inputs)
    assert_close(expected, {key.removeprefix("_orig_mod."): x for key, x in got.items()})
    found = masks_in(graphs)
    ((sizes, options),) = found
    assert options["is_causal"] and options["window_left"] == 4
    assert [size for size in sizes if size[-1] == 14] == ([[2, 14], [2, 14]] if kind == "packed" else [[2, 1, 1, 14]])


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_checkpointing(compiled: bool) -> None:
    eager, ours = decoders("mistral", layers=1)
    inputs = batch("left")
    ours.train().gradient_checkpointing_enable()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    expected, got = losses_and_gradients(eager, inputs), losses_and_gradients(run, inputs)
    assert_close(expected, {key.removeprefix("_orig_mod."): x for key, x in got.items()})


ENCODERS: dict[str, tuple[Any, Any]] = {
    "bert": (
        lambda: transformers.BertConfig(
            **ENCODER, vocab_size=97, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        transformers.BertModel,
    ),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **ENCODER, vocab_size=97, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ),
        transformers.ModernBertModel,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", ["plain", "right", "left"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, kind: str, calls: list[dict[str, Any]]) -> None:
    config, build = ENCODERS[name]
    eager, ours = pair(config(), build._from_config)
    inputs = {key: x for key, x in batch(kind).items() if key != "labels"}
    real = inputs.get("attention_mask", torch.ones(2, 14)).bool()
    outs = [model(**inputs).last_hidden_state[real] for model in (eager, ours)]
    assert_close({"out": outs[0]}, {"out": outs[1]})
    assert len(calls) == 2 and not any(call["is_causal"] for call in calls)
    assert all((call["mask"] is None) == (kind == "plain") for call in calls)
    if name == "modernbert":
        assert {call["window_size"] for call in calls} == {(None, None), (2, 2)}


@pytest.mark.usefixtures("exact_softmax")
def test_vision(calls: list[dict[str, Any]]) -> None:
    config = transformers.ViTConfig(**ENCODER, image_size=8, patch_size=2)
    eager, ours = pair(config, transformers.ViTModel._from_config)
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    outs = [model(pixels).last_hidden_state for model in (eager, ours)]
    assert_close({"out": outs[0]}, {"out": outs[1]})
    assert len(calls) == 2


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", ["plain", "right"])
def test_encoder_and_decoder(kind: str, calls: list[dict[str, Any]]) -> None:
    """Cross attention: queries and keys of unequal number, keys padded."""
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    eager, ours = pair(config, transformers.BartForConditionalGeneration._from_config)
    inputs = batch(kind)
    inputs["labels"] = torch.randint(3, 97, (2, 9))
    found = []
    for model in (eager, ours):
        out = model(**inputs, use_cache=False)
        out.loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"logits": out.logits})
    assert_close(*found)
    assert [call["is_causal"] for call in calls] == [False, True, False]


def forward(mask: Any = None, *, module: Any = None, heads: int = 4, length: int = 6, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, length, 8, dtype=torch.float64) for n in (heads, 2, 2))
    module = torch.nn.Module() if module is None else module
    return attention_forward(module, q, k, v, mask, **options)[0]


def test_dropout_is_that_of_the_op() -> None:
    mask = attention_mask(2, 6, 6)
    outs = []
    for call in ("interface", "op"):
        torch.manual_seed(1)
        q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
        if call == "interface":
            outs.append(attention_forward(torch.nn.Module(), q, k, v, mask, dropout=0.4)[0])
        else:
            outs.append(flash_inductor.attention(q, k, v, is_causal=True, dropout_p=0.4).transpose(1, 2))
    assert torch.equal(*outs)
    assert not torch.allclose(outs[0], attention_forward(torch.nn.Module(), q, k, v, mask)[0])


def test_dropout_of_a_model_is_on_in_training_only() -> None:
    config = DECODERS["llama"]()
    config.attention_dropout = 0.5
    _, ours = pair(config, transformers.AutoModelForCausalLM.from_config)
    inputs = batch("plain")
    trained = [ours.train()(**inputs).loss.item() for _ in range(2)]
    evaluated = [ours.eval()(**inputs).loss.item() for _ in range(2)]
    assert trained[0] != trained[1] and evaluated[0] == evaluated[1]


def test_masks_that_are_tensors() -> None:
    """Of models that make their own: bool is seen or not, numbers are added, more keys than there are get cut off."""
    seen = torch.rand(2, 1, 6, 8) > 0.3
    seen[..., 0] = True
    added = torch.zeros(2, 1, 6, 8, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    by_bool, by_number = forward(seen), forward(added)
    torch.testing.assert_close(by_bool, by_number, rtol=0, atol=1e-12)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, 6, 8, dtype=torch.float64) for n in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[..., :6], enable_gqa=True)
    torch.testing.assert_close(by_bool, expected.transpose(1, 2), rtol=0, atol=1e-12)


def test_position_bias_goes_on_top_of_the_mask() -> None:
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    out = forward(attention_mask(2, 6, 6), position_bias=bias)
    additive = bias + torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = forward(additive)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), bias), torch.autograd.grad(expected.sum(), bias), rtol=0, atol=1e-12
    )


def test_without_a_mask_the_argument_or_the_module_says_whether_it_is_causal() -> None:
    causal, full = forward(attention_mask(2, 6, 6)), forward(torch.ones(2, 1, 6, 6, dtype=torch.bool))
    module = torch.nn.Module()
    module.is_causal = True
    assert torch.equal(forward(module=module), causal)
    torch.testing.assert_close(forward(module=module, is_causal=False), full, rtol=0, atol=1e-12)
    assert torch.equal(forward(is_causal=True), causal)
    with pytest.raises(ValueError, match="is_causal"):
        forward()
    assert forward(module=module, length=1).shape == (2, 1, 4, 8)


@pytest.mark.parametrize(
    ("mask", "options", "error"),
    [
        (None, {"is_causal": True, "output_attentions": True}, "output_attentions"),
        (None, {"is_causal": True, "head_mask": torch.ones(4)}, "head_mask"),
        (None, {"is_causal": True, "cu_seq_lens_q": torch.tensor([0, 3, 6])}, "cu_seq_lens_q"),
        (None, {"is_causal": True, "block_table": torch.ones(1)}, "paged"),
        (torch.ones(2, 6), {}, "attention_mask: expected.*shape"),
        ("causal", {}, "attention_mask: expected.*str"),
        (attention_mask(2, 5, 6), {}, "made for 5 queries, got 6"),
        (attention_mask(2, 6, 7), {}, "made for 7 keys, got 6"),
    ],
)
def test_what_would_be_ignored_is_refused(mask: Any, options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=error):
        forward(mask, **options)


def test_inputs_without_kernels_go_to_sdpa(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(integration, "_warn_once", warnings.append)
    monkeypatch.setattr(integration, "unsupported_reasons", lambda *_: ["head dim 8 is a bad number."])
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    mask = attention_mask(2, 6, 6, attention_mask=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))
    through_sdpa = forward(mask, module=module)
    assert warnings[:1] == ["attention is left to transformers' SDPA: head dim 8 is a bad number."]
    for needed in ({"softcap": 3.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(NotImplementedError, match="bad number"):
            forward(mask, module=module, **needed)
    steps = attention_mask(2, 1, 6, q_offset=5), attention_mask(2, 1, 6, q_offset=3)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, length, 8, dtype=torch.float64) for n, length in ((4, 1), (2, 6), (2, 6)))
    decoded = [attention_forward(module, q, k, v, step)[0] for step in steps]
    monkeypatch.undo()
    for step, out in zip(steps, decoded, strict=True):
        torch.testing.assert_close(out, attention_forward(module, q, k, v, step)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(through_sdpa, forward(mask, module=module), rtol=0, atol=1e-12)


def test_a_model_with_masks_of_its_own_gets_an_error() -> None:
    """gpt-neo adds its mask to the scores; it has no attention interface."""
    config = transformers.GPTNeoConfig(
        hidden_size=16, num_layers=1, num_heads=2, vocab_size=97, attention_types=[[["global"], 1]],
        attn_implementation="flash_inductor",
    )  # fmt: skip
    with pytest.raises((KeyError, TypeError)):
        transformers.AutoModelForCausalLM.from_config(config)(**batch("plain"))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_on_a_gpu(name: str, kind: str) -> None:
    """In bfloat16, within the error that eager attention in bfloat16 has itself, against float64 on the CPU."""
    exact = losses_and_gradients(decoders(name)[0], inputs := batch(kind))
    on_gpu = {key: x.cuda() for key, x in inputs.items()}
    errors = []
    for model in decoders(name, torch.bfloat16):
        found = losses_and_gradients(model.cuda(), on_gpu)
        errors.append({key: (found[key].cpu().double() - x).norm() / (x.norm() + 1e-3) for key, x in exact.items()})
    for key, error in errors[1].items():
        assert error <= 2 * errors[0][key] + 2e-2, key


@pytest.mark.gpu
def test_sinks_on_a_gpu_are_those_of_the_reference() -> None:
    q, k, v = (torch.randn(2, n, 40, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    sinks = torch.randn(4, device="cuda", dtype=torch.bfloat16)
    mask = attention_mask(2, 40, 40, device="cuda")
    out = attention_forward(torch.nn.Module(), q, k, v, mask, s_aux=sinks)[0]
    expected = exact_attention(
        *(x.double().cpu() for x in (q, k, v)),
        flash_inductor.AttentionSpec(mask=flash_inductor.MaskSpec(upper=0)),
        sinks=sinks.double().cpu(),
    )[0]
    torch.testing.assert_close(out.cpu().double(), expected.transpose(1, 2), rtol=0, atol=2e-2)
