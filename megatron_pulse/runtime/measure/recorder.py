"""Recorder of a step's event times on one device, without slowing the step down.

On a CPU the host's clock is read around every event. On a GPU the host only enqueues work, so
events are recorded on the stream and read after the step.
"""

from __future__ import annotations

import time

import torch

from megatron_pulse.planner.program.device_program import Event, Run, Wait
from megatron_pulse.planner.trace.trace import DeviceStep, TimedOperation, TimedWait, Traffic
from megatron_pulse.runtime.p2p.transfers import Links


class StepRecorder:
    """Records one step on pipeline device ``device``, which computes on ``torch_device``.

    ``begin`` and ``end`` are called around every event and never wait. The GPU is synchronised
    once, before the step. ``to_shared_s`` is added to this host's clock.
    """

    def __init__(
        self,
        device: int,
        torch_device: torch.device,
        links: Links | None = None,
        to_shared_s: float = 0.0,
    ) -> None:
        self._device = device
        self._links = links
        self._to_shared_s = to_shared_s
        self._is_gpu = torch_device.type == "cuda"
        self._torch_device = torch_device
        self._stamps: list[tuple[Event, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._before = self._traffic()
        self._began: float | torch.cuda.Event = 0.0
        if self._is_gpu:
            torch.cuda.synchronize(torch_device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(torch_device))
        self._origin_s = time.perf_counter()

    def begin(self, event: Event) -> None:
        """Mark the start of ``event``."""
        self._began = self._now()

    def end(self, event: Event) -> None:
        """Mark the end of ``event``, the last one begun."""
        if isinstance(event, Run | Wait):
            self._stamps.append((event, self._began, self._now()))

    def finish(self) -> DeviceStep:
        """Return the recorded step on the shared clock; call after the step, waits for the GPU."""
        if self._is_gpu:
            torch.cuda.synchronize(self._torch_device)
        operations, waits = [], []
        for event, began, ended in self._stamps:
            start_s, end_s = self._seconds(began), self._seconds(ended)
            if isinstance(event, Run):
                operations.append(TimedOperation(self._device, event.operation, start_s, end_s))
            elif isinstance(event, Wait):
                waits.append(TimedWait(event.message, start_s, end_s))
        before, after = self._before, self._traffic()
        traffic = Traffic(
            self._device,
            after.sent_bytes - before.sent_bytes,
            after.received_bytes - before.received_bytes,
            after.num_messages - before.num_messages,
        )
        return DeviceStep(tuple(operations), tuple(waits), traffic)

    def _traffic(self) -> Traffic:
        """Traffic so far."""
        if self._links is None:
            return Traffic(self._device, 0, 0, 0)
        t = self._links.traffic
        sent = t.forward_bytes + t.gradient_bytes + t.encoded_bytes + t.replica_bytes
        return Traffic(self._device, sent, t.received_bytes, t.num_messages)

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._torch_device))
        return event

    def _seconds(self, stamp: float | torch.cuda.Event) -> float:
        if isinstance(stamp, float):
            return stamp + self._to_shared_s
        return self._origin_s + float(self._origin.elapsed_time(stamp)) / 1e3 + self._to_shared_s
