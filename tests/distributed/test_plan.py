"""Plans of all ranks together, without any process: every visible pair once, and no byte too many."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flash_inductor.distributed import Machine, Problem, Sequence, cost, make_plan
from flash_inductor.distributed.cost import choose
from flash_inductor.distributed.layout import LAYOUTS, Span, chunks, local_length
from flash_inductor.distributed.plan import METHODS, Plan
from flash_inductor.reference.attention import visible
from flash_inductor.spec import MaskSpec

BANDS = [
    MaskSpec(),
    MaskSpec(upper=0),
    MaskSpec(lower=-7, upper=0),
    MaskSpec(lower=-40, upper=0),
    MaskSpec(lower=-3, upper=5),
    MaskSpec(lower=-30, upper=21),
    MaskSpec(lower=0, upper=0),
    MaskSpec(lower=2, upper=9),
    MaskSpec(upper=-4),
    MaskSpec(lower=-5),
]


def positions(spans: Any) -> list[int]:
    return [i for span in spans for i in range(span.start, span.stop)]


def plans(sequence: Sequence, method: str, *, backward: bool = False) -> list[Plan]:
    return [make_plan(sequence, rank, method, backward=backward) for rank in range(sequence.ranks)]


def random_sequence(band: MaskSpec) -> Sequence:
    ranks = random.choice([1, 2, 3, 4, 7])
    return Sequence(random.randint(2 * ranks, 90), ranks, random.choice(LAYOUTS), band)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_a_sequence_evenly(layout: str, ranks: int) -> None:
    for length in (16, 37, 64):
        held = [positions(chunks(length, ranks, rank, layout)) for rank in range(ranks)]
        assert sorted(i for part in held for i in part) == list(range(length))
        assert max(map(len, held)) - min(map(len, held)) <= (1 if layout == "contiguous" else 2)
        assert [len(x) for x in held] == [local_length(length, ranks, rank, layout) for rank in range(ranks)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_tiles_show_each_visible_pair_once(band: MaskSpec, method: str) -> None:
    for turn in range(25):
        sequence = random_sequence(band)
        count = torch.zeros(sequence.length, sequence.length, dtype=torch.int64)
        for plan in plans(sequence, method, backward=turn % 2 == 1):
            queries = torch.tensor(positions(chunks(sequence.length, sequence.ranks, plan.rank, sequence.layout)))
            for step in plan.steps:
                keys = torch.tensor(positions(piece.positions for piece in step.pieces))
                pairs = 0
                for tile in step.tiles:
                    i = queries[tile.queries.start : tile.queries.stop]
                    j = keys[tile.keys.start : tile.keys.stop]
                    seen = visible(tile.band, len(i), len(j))
                    assert seen.any(1).any() and tile.pairs == seen.sum()
                    pairs += tile.pairs
                    count[i[:, None], j] += seen
                assert pairs or not step.tiles
        assert torch.equal(count, visible(band, sequence.length, sequence.length).long()), sequence


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_what_is_sent_is_what_is_seen(band: MaskSpec, method: str) -> None:
    for _ in range(25):
        sequence = random_sequence(band)
        seen = visible(band, sequence.length, sequence.length)
        all_plans = plans(sequence, method)
        assert len({len(plan.steps) for plan in all_plans}) == 1
        for plan in all_plans:
            own = positions(chunks(sequence.length, sequence.ranks, plan.rank, sequence.layout))
            wanted = set(seen[own].any(0).nonzero().flatten().tolist()) - set(own)
            got = [
                i for step in plan.steps for p in step.pieces if p.rank != plan.rank for i in positions([p.positions])
            ]
            assert sorted(got) == sorted(wanted)
            assert plan.rows_received == len(wanted)
            for i, step in enumerate(plan.steps):
                assert step.exchanges or not (step.send or step.receive)
                for target, spans in step.send:
                    sent = [own[row] for row in positions(spans)]
                    theirs = all_plans[target].steps[i]
                    pieces = [p for p in theirs.pieces if p.rank == plan.rank]
                    in_order = sorted(pieces, key=lambda piece: piece.rows)
                    assert sent == positions(piece.positions for piece in in_order)
                    assert (plan.rank, len(sent)) in theirs.receive


def test_zigzag_balances_causal_attention_and_contiguous_does_not() -> None:
    for layout, most in (("zigzag", 1.0), ("contiguous", 1.8)):
        pairs = [plan.pairs for plan in plans(Sequence(1 << 16, 8, layout, MaskSpec(upper=0)), "ring")]
        ratio = max(pairs) / (sum(pairs) / len(pairs))
        assert ratio == pytest.approx(most, abs=0.1)


def test_causal_attention_in_zigzag_takes_one_call_a_step_and_three_quarters_of_a_ring() -> None:
    for plan in plans(Sequence(1 << 16, 8, "zigzag", MaskSpec(upper=0)), "ring"):
        assert [len(step.tiles) for step in plan.steps] == [1] * 8
    sent = sum(plan.rows_sent for plan in plans(Sequence(1 << 16, 8, "zigzag", MaskSpec(upper=0)), "ring"))
    assert sent == 0.75 * 7 * (1 << 16)  # passing all keys round sends 7 * 2^16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_backward_computes_with_own_keys_first_and_last(layout: str) -> None:
    sequence = Sequence(1 << 12, 4, layout, MaskSpec(upper=0))
    for forward, backward in zip(plans(sequence, "ring"), plans(sequence, "ring", backward=True), strict=True):
        assert (forward.rows_sent, forward.rows_received) == (backward.rows_sent, backward.rows_received)
        assert [step.exchanges for step in backward.steps] == [False, True, True, True, False]
        assert all(step.tiles for step in (backward.steps[0], backward.steps[-1]))
        assert forward.pairs == backward.pairs


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_window_costs_its_width_whatever_the_length(ranks: int) -> None:
    for length in (1 << 16, 1 << 20):
        for plan in plans(Sequence(length, ranks, "contiguous", MaskSpec(lower=-255, upper=0)), "ring"):
            assert len(plan.steps) == 2
            assert plan.rows_received == (255 if plan.rank else 0)
            assert plan.rows_sent == (255 if plan.rank < ranks - 1 else 0)


def test_a_plan_for_1024_ranks_is_made_in_reasonable_time() -> None:
    plan = make_plan(Sequence(1 << 24, 1024, "zigzag", MaskSpec(upper=0)), 500, "ring")
    assert len(plan.steps) == 1024
    assert all(len(step.tiles) == 1 for step in plan.steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, "spiral"), "layout: expected one of contiguous, zigzag, got 'spiral'"),
        ((3, 2, "zigzag"), "length: expected at least 4 positions for 2 ranks in layout 'zigzag', got 3"),
    ],
)
def test_what_cannot_be_split_is_said(arguments: tuple[int, int, str], message: str) -> None:
    length, ranks, layout = arguments
    with pytest.raises(ValueError, match=message):
        make_plan(Sequence(length, ranks, layout, MaskSpec()), 0, "ring")


def test_an_unknown_method_is_said() -> None:
    with pytest.raises(ValueError, match="method: expected one of ring, gather, or 'auto', got 'tree'"):
        make_plan(Sequence(8, 2, "zigzag", MaskSpec()), 0, "tree")


def test_short_sequences_are_gathered_and_long_ones_go_round() -> None:
    def chosen(length: int, device: str = "cuda", band: MaskSpec = MaskSpec(upper=0)) -> str:  # noqa: B008
        query, key = (1, 32, length // 8, 128), (1, 8, length // 8, 128)
        return choose(Sequence(length, 8, "zigzag", band), query, key, key, 2, device)

    assert chosen(1 << 10) == "gather"
    assert chosen(1 << 20) == "ring"


def test_time_hides_a_transfer_behind_attention_only_if_it_is_shorter() -> None:
    plan = make_plan(Sequence(1 << 14, 4, "contiguous", MaskSpec()), 0, "ring")
    problem = Problem(batch=1, q_heads=8, k_heads=8, head_dim=64, value_dim=64, element_size=2)
    fast = cost(plan, problem, Machine(1e12, 1e12, 0.0, 1e15))
    slow = cost(plan, problem, Machine(1e12, 1e6, 0.0, 1e15))
    assert fast.forward_seconds == pytest.approx(fast.compute_seconds)
    assert slow.forward_seconds > slow.compute_seconds
    assert slow.forward_seconds == pytest.approx(slow.forward_bytes / 1e6, rel=0.05)


def test_span() -> None:
    assert Span(2, 5) & Span(4, 9) == Span(4, 5)
    assert (Span(2, 5) & Span(7, 9)).size == 0
