"""Timing of pieces of work on a CPU or a GPU, without waiting for the GPU between pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[Callable[[], None]], None]
"""Does the work once, and calls its argument before the first, between, and after the
last piece.
"""


@dataclass(frozen=True)
class RepetitionLimits:
    """Duration of the measurement of one layer at one size.

    Repeats until ``enough_s`` seconds have passed and ``min_repetitions`` are done. Stops at
    ``max_repetitions``, and after ``limit_s`` once there is one.
    """

    min_repetitions: int = 5
    max_repetitions: int = 200
    enough_s: float = 0.05
    limit_s: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_repetitions <= self.max_repetitions:
            raise ValueError("patience needs 1 <= min_repetitions <= max_repetitions")
        if not (self.enough_s >= 0 and self.limit_s > 0):
            raise ValueError("patience needs enough_s >= 0 and limit_s > 0")


def repeat(work: Work, device: torch.device, patience: RepetitionLimits) -> list[list[float]]:
    """Seconds of every piece, one list per repetition of ``work``, after one warm-up.

    On a GPU several repetitions are queued before waiting. A piece then takes its time on the GPU,
    or its launch time on the CPU, whichever is longer, as in training.
    """
    on_gpu = device.type == "cuda"
    list(_queue(work, device, 1))
    rows: list[list[float]] = []
    start = time.perf_counter()
    while True:
        rows += _queue(work, device, min(4, patience.max_repetitions - len(rows)) if on_gpu else 1)
        passed = time.perf_counter() - start
        if len(rows) >= patience.max_repetitions or passed >= patience.limit_s:
            return rows
        if len(rows) >= patience.min_repetitions and passed >= patience.enough_s:
            return rows


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean without the least and the largest tenth, at least zero, and interquartile range.

    The mean time of a step is the sum of its operations' means, but not of their medians. Of five
    to nine values, one at each end is left out; of fewer, none.
    """
    ordered = torch.tensor(values, dtype=torch.float64).sort().values
    count = len(values)
    left_out = max(count // 10, 1) if count >= 5 else 0
    low, high = ordered.quantile(ordered.new_tensor([0.25, 0.75])).tolist()
    return max(0.0, float(ordered[left_out : count - left_out].mean())), high - low


def _queue(work: Work, device: torch.device, repetitions: int) -> Iterator[list[float]]:
    if device.type != "cuda":
        for _ in range(repetitions):
            marks: list[float] = []
            work(lambda marks=marks: marks.append(time.perf_counter()))  # type: ignore[misc]
            yield [b - a for a, b in zip(marks, marks[1:], strict=False)]
        return
    recorded: list[list[Any]] = []
    for _ in range(repetitions):
        events: list[Any] = []

        def mark(events: list[Any] = events) -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        work(mark)
        recorded.append(events)
    torch.cuda.synchronize(device)
    for events in recorded:
        yield [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]
