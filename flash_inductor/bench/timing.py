"""Interleaved timing: all implementations take turns in several rounds, so that a clock that drifts favours none."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
MOST_CALLS = 20  # in one turn


class Clock(Protocol):
    def times(self, call: Call, count: int) -> list[float]:
        """Milliseconds of each of ``count`` calls."""


class CpuClock:
    def times(self, call: Call, count: int) -> list[float]:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - begin))
        return found


class GpuClock:
    """CUDA events around each call, with a cold L2 and a queue that the host keeps filled.

    A short kernel starts before the host has launched the next one, and the gap would count as its time: so the GPU
    first sleeps for as long as the host needs to launch everything.
    """

    LONGEST_SLEEP_MS = 30.0

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = 4 * getattr(properties, "L2_cache_size", 64 * 2**20)
        self.cache = torch.empty(size, dtype=torch.int8, device="cuda")
        self.cycles_per_ms = self._calibrate()
        self.host_ms: weakref.WeakKeyDictionary[Call, float] = weakref.WeakKeyDictionary()

    def _calibrate(self) -> float:
        """Cycles of torch.cuda._sleep in a millisecond."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cycles = 10_000_000
        for _ in range(2):  # the first one wakes the clocks
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        return cycles / start.elapsed_time(end)

    def times(self, call: Call, count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        known = self.host_ms.get(call)
        torch.cuda._sleep(int(min(self.LONGEST_SLEEP_MS, 1.25 * (known or 2.0) * count) * self.cycles_per_ms))
        begin = time.perf_counter()
        for start, end in events:
            self.cache.zero_()
            start.record()
            call()
            end.record()
        # A call that waits for the GPU itself takes as long as the sleep: the shortest time seen is the host's.
        took = 1e3 * (time.perf_counter() - begin) / count
        self.host_ms[call] = took if known is None else min(known, took)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def interleave(
    calls: Mapping[str, Call], clock: Clock, rounds: int, total_ms: float, begun: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Median milliseconds of each round, for each call by name; each gets about ``total_ms`` in all.

    ``begun`` is told the name before each turn.  At least 3 rounds of one call, however long that is.
    """
    estimate = {}
    for name, call in calls.items():
        begun(name)
        clock.times(call, 1)
        estimate[name] = max(1e-3, min(clock.times(call, 2)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:  # nobody always follows the same neighbour
            if i >= 3 and sum(found[name]) > 2 * total_ms:
                continue
            begun(name)
            count = max(1, min(MOST_CALLS, round(total_ms / rounds / estimate[name])))
            found[name].append(statistics.median(clock.times(calls[name], count)))
    return found


def ceilings(seconds: float = 0.3) -> dict[str, float]:
    """What this GPU does today: a bf16 product of 8192 cubed in TFLOP/s, and a large copy in GB/s, read and written."""
    clock = GpuClock()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y, z = torch.randn_like(x), torch.empty_like(x)
    large = torch.empty(2**30, device="cuda", dtype=torch.int8).random_()
    target = torch.empty_like(large)
    calls = {"product": lambda: torch.matmul(x, y, out=z), "copy": lambda: target.copy_(large)}
    ms = {name: statistics.median(t) for name, t in interleave(calls, clock, 3, 1e3 * seconds / 2).items()}
    return {"product_tflops": 2 * 8192**3 / ms["product"] / 1e9, "copy_gbs": 2 * 2**30 / ms["copy"] / 1e6}
