"""Recorders of a step's event times on one device, for traces and for its utilisation.

They do not slow the step down. On a CPU the host's clock is read around every event. On a GPU the
host only enqueues work, so events are recorded on the stream and read after the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_pulse.planner.program.device_program import Event, Run, Wait
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.trace.trace import DeviceStep, TimedOperation, TimedWait, Traffic
from megatron_pulse.runtime.p2p.transfers import Links

type _Stamp = float | torch.cuda.Event


class _Stamps:
    """Stamps at the start and the end of events of some ``kinds``, on ``device``."""

    def __init__(self, device: torch.device, *kinds: type[Event]) -> None:
        self._device, self._kinds = device, kinds
        self._stamps: list[tuple[Event, _Stamp, _Stamp]] = []
        self._began: _Stamp = 0.0

    def begin(self, event: Event) -> None:
        """Mark the start of ``event``."""
        if isinstance(event, self._kinds):
            self._began = self._now()

    def end(self, event: Event) -> None:
        """Mark the end of ``event``, the last one begun."""
        if isinstance(event, self._kinds):
            self._stamps.append((event, self._began, self._now()))

    def _now(self) -> _Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class StepRecorder(_Stamps):
    """Records one step on pipeline device ``number``, which computes on ``device``.

    The GPU is synchronised once, before the step. ``to_shared_s`` is added to this host's clock.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        links: Links | None = None,
        to_shared_s: float = 0.0,
    ) -> None:
        super().__init__(device, Run, Wait)
        self._number = number
        self._links = links
        self._to_shared_s = to_shared_s
        self._before = self._traffic()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = self._now()
        self._origin_s = time.perf_counter()

    def finish(self) -> DeviceStep:
        """Return the recorded step on the shared clock; call after the step, waits for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        operations, waits = [], []
        for event, *stamps in self._stamps:
            start_s, end_s = map(self._seconds, stamps)
            if isinstance(event, Run):
                operations.append(TimedOperation(self._number, event.operation, start_s, end_s))
            elif isinstance(event, Wait):
                waits.append(TimedWait(event.message, start_s, end_s))
        before, after = self._before, self._traffic()
        traffic = Traffic(
            self._number,
            after.sent_bytes - before.sent_bytes,
            after.received_bytes - before.received_bytes,
            after.num_messages - before.num_messages,
        )
        return DeviceStep(tuple(operations), tuple(waits), traffic)

    def _traffic(self) -> Traffic:
        """Traffic so far."""
        if self._links is None:
            return Traffic(self._number, 0, 0, 0)
        t = self._links.traffic
        sent = t.forward_bytes + t.gradient_bytes + t.encoded_bytes + t.replica_bytes
        return Traffic(self._number, sent, t.received_bytes, t.num_messages)

    def _seconds(self, stamp: _Stamp) -> float:
        here = stamp if isinstance(stamp, float) else self._origin_s + _between(self._origin, stamp)
        return here + self._to_shared_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one device in a step: computing, in total, and per operation type and stage."""

    busy_s: float = 0.0
    window_s: float = 0.0
    operations: Mapping[tuple[OpType, int], float] = field(default_factory=dict)


class UtilizationMeter(_Stamps):
    """Measures consecutive steps on ``device``: ``start``, events, ``stop``, ``read``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, Run)
        self._window: list[_Stamp] = []

    def start(self) -> None:
        """Mark the start of a step."""
        self._stamps.clear()
        self._window = [self._now()]

    def stop(self) -> None:
        """Mark the end of the step on the host."""
        self._window.append(self._now())

    def read(self) -> StepTime:
        """Times of the last step; on a GPU its work must be complete."""
        operations: defaultdict[tuple[OpType, int], float] = defaultdict(float)
        for event, began, ended in self._stamps:
            if isinstance(event, Run):
                operations[event.operation.kind, event.operation.stage] += _between(began, ended)
        return StepTime(sum(operations.values()), _between(*self._window), dict(operations))


def _between(began: _Stamp, ended: _Stamp) -> float:
    """Seconds between two stamps of one device."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    return float(began.elapsed_time(ended)) / 1e3
