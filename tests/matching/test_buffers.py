"""Causal buffers: read while compiling, and a later change of them makes Dynamo compile again."""

import pytest
import torch
from torch import nn

from flash_inductor._compat.buffers import buffer_value, guard_unchanged
from flash_inductor.matching.masks import MaskProof, prove

SIZE = 8


class Masked(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.register_buffer("bias", bias)

    def forward(self, x):
        t = x.shape[-1]
        return x.masked_fill(self.bias[:, :, :t, :t] == 0, 0.0)


def causal():
    return torch.tril(torch.ones(SIZE, SIZE)).view(1, 1, SIZE, SIZE)


def keep_band(x, lower, upper):
    x = x if lower is None else x.triu(lower)
    return x if upper is None else x.tril(upper)


class Backend:
    """Replaces a proved mask by its band: wrong as soon as the buffer is something else."""

    def __init__(self):
        self.proofs = []

    def __call__(self, graph_module, _):
        graph = graph_module.graph
        fill = graph.find_nodes(op="call_method", target="masked_fill")[0]
        size = fill.meta["example_value"].shape[-1]
        proof = prove(fill.args[1], "drop", size, size, fill)
        self.proofs.append(proof)
        if isinstance(proof, MaskProof) and guard_unchanged(proof.buffers):
            with graph.inserting_before(fill):
                band = graph.call_function(keep_band, (fill.args[0], proof.mask.lower, proof.mask.upper))
            fill.replace_all_uses_with(band)
            graph.erase_node(fill)
            graph_module.recompile()
        return graph_module


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, **kwargs):
    backend = Backend()
    return torch.compile(model, backend=backend, fullgraph=True, **kwargs), backend


@pytest.mark.parametrize("dynamic", [False, True])
def test_causal_buffer_is_read(dynamic):
    model = Masked(causal())
    run, backend = compiled(model, dynamic=dynamic)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(run(x), model(x))
    (proof,) = backend.proofs
    assert isinstance(proof, MaskProof) and (proof.mask.lower, proof.mask.upper) == (None, 0)
    assert len(proof.buffers) == 1 and "bias" in proof.buffers[0].target


def change_in_place(model):
    model.bias.fill_(1)


def change_one_element(model):
    with torch.no_grad():
        model.bias[0, 0, 1, 2] = 1


def load(model):
    model.load_state_dict({"bias": torch.triu(torch.ones(SIZE, SIZE)).view(1, 1, SIZE, SIZE)})


def replace(model):
    model.bias = torch.ones(1, 1, SIZE, SIZE)


def replace_data(model):
    model.bias.data = torch.ones(1, 1, SIZE, SIZE)


@pytest.mark.parametrize("change", [change_in_place, change_one_element, load, replace, replace_data])
@pytest.mark.parametrize("dynamic", [False, True])
def test_changed_buffer_compiles_again(change, dynamic):
    model = Masked(causal())
    run, backend = compiled(model, dynamic=dynamic)
    x = torch.randn(2, 3, 6, 6)
    for _ in range(3):
        assert torch.equal(run(x), model(x))
    assert len(backend.proofs) == 1
    change(model)
    for _ in range(3):
        assert torch.equal(run(x), model(x))
    assert len(backend.proofs) == 2


def test_same_content_does_not_compile_again():
    model = Masked(causal())
    run, backend = compiled(model)
    x = torch.randn(2, 3, 6, 6)
    run(x)
    model.bias.copy_(causal())
    assert torch.equal(run(x), model(x))
    model.bias = causal()
    assert torch.equal(run(x), model(x))
    assert len(backend.proofs) == 1


def test_nested_modules_and_change_back():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Masked(causal())))
    run, backend = compiled(model)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(run(x), model(x))
    model[1][0].bias.fill_(0)
    assert torch.equal(run(x), model(x))
    model[1][0].bias.copy_(causal())
    assert torch.equal(run(x), model(x))
    assert isinstance(backend.proofs[0], MaskProof) and not isinstance(backend.proofs[1], MaskProof)


def test_inference_tensors_are_not_read():
    with torch.inference_mode():
        bias = causal()
    model = Masked(bias)
    run, backend = compiled(model)
    with torch.inference_mode():
        run(torch.randn(2, 3, 6, 6))
    (proof,) = backend.proofs
    assert not isinstance(proof, MaskProof) and "bias" in proof.reason


def test_a_buffer_written_by_the_graph_is_not_read():
    class Writing(Masked):
        def forward(self, x):
            y = super().forward(x)
            self.bias.add_(0)
            return y

    run, backend = compiled(Writing(causal()))
    run(torch.randn(2, 3, 6, 6))
    assert not isinstance(backend.proofs[0], MaskProof)


def test_a_plain_input_is_no_buffer():
    seen = []

    def backend(graph_module, _):
        nodes = graph_module.graph.find_nodes(op="placeholder")
        seen.append([buffer_value(n) for n in nodes] + [guard_unchanged(nodes)])
        return graph_module

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))
    assert seen == [[None, False]]
