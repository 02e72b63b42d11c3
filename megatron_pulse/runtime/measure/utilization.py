"""Device utilisation: compute time and duration of a step, measured without slowing it down.

On a CPU the host's clock is read around every operation. On a GPU the host only enqueues work, so
events are recorded on the stream and read after the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_pulse.planner.program.device_program import Event, Run
from megatron_pulse.planner.schedule.operations import OpType

type _Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class StepTime:
    """Seconds of one device in a step: computing, in total, and per operation type and stage."""

    busy_s: float = 0.0
    window_s: float = 0.0
    operations: Mapping[tuple[OpType, int], float] = field(default_factory=dict)


class UtilizationMeter:
    """Measures consecutive steps on ``device``: ``start``, events, ``stop``, ``read``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._ran: list[tuple[OpType, int]] = []
        self._window: list[_Stamp] = []

    def start(self) -> None:
        """Mark the start of a step."""
        self._stamps.clear()
        self._ran.clear()
        self._window = [self._now()]

    def begin(self, event: Event) -> None:
        """Mark the start of ``event``."""
        if isinstance(event, Run):
            self._ran.append((event.operation.kind, event.operation.stage))
            self._stamps.append(self._now())

    def end(self, event: Event) -> None:
        """Mark the end of ``event``, the last one begun."""
        if isinstance(event, Run):
            self._stamps.append(self._now())

    def stop(self) -> None:
        """Mark the end of the step on the host."""
        self._window.append(self._now())

    def read(self) -> StepTime:
        """Times of the last step; on a GPU its work must be complete."""
        pairs = zip(self._stamps[::2], self._stamps[1::2], strict=True)
        operations: defaultdict[tuple[OpType, int], float] = defaultdict(float)
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
