"""Attention dropout: the generator against published vectors, its statistics, and what the op does with it."""

from __future__ import annotations

import math

import pytest
import torch

from flash_inductor.functional import attention
from flash_inductor.ops import attn, attn_backward, philox
from flash_inductor.reference import kept
from flash_inductor.reference import philox as reference_philox
from flash_inductor.testing import make_inputs

# Known answers of philox4x32 from the tests of Random123: counter, key, rounds, words.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 7,
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 10,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), ANSWERS)
def test_known_answers(counter, key, rounds, words):
    got = reference_philox(tuple(torch.tensor([c]) for c in counter), key, rounds)
    assert tuple(int(x) for x in got) == words


@pytest.mark.parametrize("state", [(0, 0), (2**62 + 5, 2**40 + 3), (-1, -1), (-(2**63), 2**63 - 1)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999999])
def test_kernels_and_reference_drop_the_same(state, p, monkeypatch):
    monkeypatch.setattr(philox, "_CHUNK", 64)
    rng = torch.tensor(state)
    want = kept(2, 3, 40, 75, p, rng)
    rows, columns = range(3, 40), range(5, 70)
    got = philox.dropped(torch.arange(6).view(2, 3), rows, columns, p, rng)
    assert torch.equal(~got, want[:, :, 3:40, 5:70])


def test_statistics():
    """Rates, and independence of neighbours in every direction and between seeds, within 5 standard deviations."""
    p, shape = 0.3, (2, 4, 256, 512)
    keep = kept(*shape, p, torch.tensor([1234, 0])).double()
    n = keep.numel()
    assert abs(keep.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    per_row = keep.mean(-1)
    assert per_row.sub(1 - p).abs().max() < 6 * math.sqrt(p * (1 - p) / shape[3])
    assert abs(per_row.var() / (p * (1 - p) / shape[3]) - 1) < 0.15
    centred = keep - (1 - p)
    bound = 5 * p * (1 - p) / math.sqrt(n)
    for dim in range(4):
        for shift in (1, 4) if dim == 3 else (1,):
            assert abs((centred * centred.roll(shift, dim)).mean()) < bound
    for other in ([1235, 0], [1234, 1], [1234 + 2**32, 0]):
        assert abs((centred * (kept(*shape, p, torch.tensor(other)).double() - (1 - p))).mean()) < bound


def test_the_mean_over_draws_is_attention_without_dropout():
    """Batch entries draw their own numbers, so equal entries are samples."""
    inputs = make_inputs("expanded", batch=3000, heads=1, q_len=6, kv_len=8, head_dim=4)
    inputs = (inputs[0][:1].expand(3000, -1, -1, -1), *inputs[1:])
    want = attn(*(x[:1] for x in inputs))[0][0]
    outs = attention(*inputs, dropout_p=0.4, rng_state=torch.tensor([3, 0]))
    deviation = outs.std(0) / math.sqrt(len(outs))
    assert ((outs.mean(0) - want).abs() < 5 * deviation).all()


def test_the_lse_is_that_of_the_undropped_softmax():
    inputs = make_inputs()
    dropped = attn(*inputs, dropout_p=0.5, rng_state=torch.tensor([1, 2]))
    torch.testing.assert_close(dropped[1], attn(*inputs)[1])
    assert not torch.allclose(dropped[0], attn(*inputs)[0])


def test_no_dropout_draws_no_numbers():
    before = torch.get_rng_state()
    attention(*make_inputs(), dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    attention(*make_inputs(), dropout_p=0.1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_checkpoint_recomputes_the_same_dropout():
    inputs = make_inputs(requires_grad=True)

    def function(*tensors):
        return attention(*tensors, dropout_p=0.5)

    torch.manual_seed(1)
    want = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), want)


def test_gradients_drop_what_the_output_dropped():
    """Only the kept keys of a query get a gradient of value, and exactly those."""
    query, key, value = make_inputs(batch=2, heads=2, q_len=1, kv_len=50)
    rng = torch.tensor([5, 6])
    out, lse = attn(query, key, value, dropout_p=0.6, rng_state=rng)
    grads = attn_backward(torch.ones_like(out), None, query, key, value, out, lse, rng_state=rng, dropout_p=0.6)
    assert torch.equal(grads[2].ne(0).all(-1), kept(2, 2, 1, 50, 0.6, rng)[:, :, 0])
