"""What context-parallel attention sends, holds and takes: a model, and the choice that rests on it.

Bytes follow from the plan exactly (a test counts what ranks really send); times are estimates, good enough to tell a
transfer that is hidden from one that isn't.
"""

from __future__ import annotations

from collections.abc import Sequence as Sizes
from dataclasses import dataclass
from functools import lru_cache

from .plan import Plan, Sequence, make_plan


@dataclass(frozen=True)
class Machine:
    """One rank's processor and its link to the others.

    Attributes:
        flops: FLOP/s that the attention kernels reach.
        bandwidth: bytes/s that a rank sends while it receives as many.
        latency: seconds that an exchange or a kernel takes whatever its size.
        memory_bandwidth: bytes/s of its memory.
    """

    flops: float
    bandwidth: float
    latency: float
    memory_bandwidth: float


NVLINK = Machine(500e12, 300e9, 20e-6, 4e12)  # Hopper GPUs of one host
NETWORK = Machine(500e12, 40e9, 30e-6, 4e12)  # with one link of 400 Gbit/s for each
CPU = Machine(50e9, 1e9, 200e-6, 10e9)
RANKS_OF_HOST = 8
GATHERED_SHARE = 1 << 30  # bytes of keys and values that a rank may hold at once to save the steps of a ring


@dataclass(frozen=True)
class Problem:
    """Sizes of one rank's attention: those of query, key and value, and bytes per element."""

    batch: int
    q_heads: int
    k_heads: int
    head_dim: int
    value_dim: int
    element_size: int

    @property
    def bytes_of_row(self) -> int:
        """Bytes of keys and values per position."""
        return self.batch * self.k_heads * (self.head_dim + self.value_dim) * self.element_size

    def flops(self, pairs: int) -> int:
        """FLOPs of a forward over so many pairs of query and key."""
        return 2 * self.batch * self.q_heads * pairs * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Cost:
    """Of one rank and one attention.

    Attributes:
        forward_bytes: sent in the forward.
        backward_bytes: sent in the backward: the keys and values again, and the gradients of those received.
        extra_memory: bytes that the largest moment of the forward needs beside the inputs and the output.
        forward_seconds, compute_seconds: estimated time of a forward, and of its attention calls alone.
    """

    forward_bytes: int
    backward_bytes: int
    extra_memory: int
    forward_seconds: float
    compute_seconds: float


def cost(plan: Plan, problem: Problem, machine: Machine) -> Cost:
    """What a plan costs its rank."""
    row = problem.bytes_of_row
    received = [sum(rows for _, rows in step.receive) for step in plan.steps]
    sent = [sum(span.size for _, spans in step.send for span in spans) for step in plan.steps]
    moved = [machine.latency + max(a, b) * row / machine.bandwidth for a, b in zip(received, sent, strict=True)]
    moved = [time if step.exchanges else 0.0 for time, step in zip(moved, plan.steps, strict=True)]
    merged = [
        problem.batch * problem.q_heads * problem.value_dim * 12 * sum(tile.queries.size for tile in step.tiles)
        for step in plan.steps
    ]
    is_merged = len(plan.steps) > 1
    computed = [
        machine.latency * len(step.tiles)
        + problem.flops(sum(tile.pairs for tile in step.tiles)) / machine.flops
        + (bytes_merged / machine.memory_bandwidth if is_merged else 0.0)
        for step, bytes_merged in zip(plan.steps, merged, strict=True)
    ]
    time = moved[0]  # nothing to hide it behind
    for i, own in enumerate(computed):
        time += max(own, moved[i + 1]) if i + 1 < len(moved) else own
    joined = [
        sum(piece.rows.size for piece in step.pieces) if len({p.rank for p in step.pieces}) > 1 else 0
        for step in plan.steps
    ]
    held = [a + b + c for a, b, c in zip(sent, received, joined, strict=True)]
    pairs = [a + b for a, b in zip(held, [*held[1:], 0], strict=True)]  # this step's, and the next one on its way
    accumulators = 4 * problem.batch * problem.q_heads * (problem.value_dim + 1) * plan.rows if is_merged else 0
    return Cost(
        plan.rows_sent * row,
        (plan.rows_sent + plan.rows_received) * row,
        max(pairs) * row + accumulators,
        time,
        sum(computed),
    )


def machine_of(device_type: str, ranks: int) -> Machine:
    """The default for so many ranks; the same on each of them."""
    if device_type == "cpu":
        return CPU
    return NVLINK if ranks <= RANKS_OF_HOST else NETWORK


@lru_cache(maxsize=4096)
def choose(
    sequence: Sequence,
    query: Sizes[int],
    key: Sizes[int],
    value: Sizes[int],
    element_size: int,
    device_type: str,
) -> str:
    """ "ring" or "gather": the faster by the model, but no gathering of more than GATHERED_SHARE bytes.

    Depends on nothing in which ranks differ: shares may differ by a position, so sizes along the sequence don't count.
    """
    problem = Problem(query[0], query[1], key[1], query[3], value[3], element_size)
    machine = machine_of(device_type, sequence.ranks)
    ranks = sorted({0, sequence.ranks // 2, sequence.ranks - 1})
    gathers = [cost(make_plan(sequence, rank, "gather"), problem, machine) for rank in ranks]
    if max(found.extra_memory for found in gathers) > GATHERED_SHARE:
        return "ring"
    rings = [cost(make_plan(sequence, rank, "ring"), problem, machine) for rank in ranks]
    gathered = max(found.forward_seconds for found in gathers)
    return "gather" if gathered <= max(found.forward_seconds for found in rings) else "ring"
