"""How long a device computes in a step, and how long the step is, without slowing it down.

On a CPU the host's clock is read around every operation. On a GPU the host only enqueues work:
events are recorded on its stream instead, and their times are read when the step has ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.step.program import Event, Run

type _Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class StepTime:
    """Seconds that one device computed, of the whole forward and backward of the step, and of its
    operations by kind and stage."""

    busy_s: float = 0.0
    window_s: float = 0.0
    operations: Mapping[tuple[Kind, int], float] = field(default_factory=dict)


class BusyMeter:
    """Measures one step after another on ``device``: ``start``, events, ``stop``, ``read``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._ran: list[tuple[Kind, int]] = []
        self._window: list[_Stamp] = []

    def start(self) -> None:
        """The step begins."""
        self._stamps.clear()
        self._ran.clear()
        self._window = [self._now()]

    def begin(self, event: Event) -> None:
        """``event`` begins."""
        if isinstance(event, Run):
            self._ran.append((event.operation.kind, event.operation.stage))
            self._stamps.append(self._now())

    def end(self, event: Event) -> None:
        """``event``, which began last, has ended."""
        if isinstance(event, Run):
            self._stamps.append(self._now())

    def stop(self) -> None:
        """The step has ended on the host."""
        self._window.append(self._now())

    def read(self) -> StepTime:
        """The step that was measured last; on a GPU its work must be done."""
        pairs = zip(self._stamps[::2], self._stamps[1::2], strict=True)
        operations: defaultdict[tuple[Kind, int], float] = defaultdict(float)
        for which, pair in zip(self._ran, pairs, strict=True):
            operations[which] += _seconds(*pair)
        return StepTime(sum(operations.values()), _seconds(*self._window), dict(operations))

    def _now(self) -> _Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: _Stamp, ended: _Stamp) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    return float(began.elapsed_time(ended)) / 1e3
