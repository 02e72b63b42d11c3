"""Tracer of selected steps: one recorder per step, and one trace file of all devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.trace.trace import (
    BETWEEN_DEVICES,
    DeviceStep,
    Trace,
    merge_step,
    save_trace,
)
from megatron_pulse.profile.measurement.machine import device_name, num_threads
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.measure.recorder import StepRecorder
from megatron_pulse.runtime.measure.shared_clock import SharedClock, share_clock
from megatron_pulse.runtime.p2p.transfers import Links

FILE = "trace.json"


@dataclass(frozen=True)
class TracedRun:
    """Description of a traced run.

    Plan digest, backbone, schedule, parallel sizes, layers of each stage, and further settings that
    affect times (``Trace.run``).
    """

    plan_digest: str
    backbone: Mapping[str, Any]
    schedule: Schedule
    world: Mapping[str, int]
    stages: tuple[tuple[str, ...], ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)


class Tracer:
    """Traces the given ``steps``, counted from 1, of a pipeline. All calls are collective.

    ``group`` is the pipeline's (None: one device). With a ``folder`` the last device writes
    ``trace.json`` there after the last traced step, or in ``close``.
    """

    def __init__(
        self,
        steps: range,
        traced: TracedRun,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout_s: float,
        folder: Path | None = None,
    ) -> None:
        self._steps = steps
        self._traced = traced
        self._group = group
        self._device = device
        self._folder = folder
        self._clock: SharedClock = share_clock(group, device, timeout_s)
        self._step = 0
        self._done: list[tuple[int, DeviceStep]] = []
        self._is_written = folder is None

    def begin(self, links: Links | None, traced: TracedRun | None = None) -> StepRecorder | None:
        """Begin a training step; returns its recorder, or None if the step is not traced.

        ``traced`` describes a step with a schedule of its own. Only steps with the schedule of the
        first traced one are traced, since a trace has one.
        """
        self._step += 1
        if self._step not in self._steps:
            return None
        if traced is not None:
            if not self._done:
                self._traced = traced
            elif traced.schedule != self._traced.schedule:
                return None
        pipeline_device = self._group.rank() if self._group is not None else 0
        return StepRecorder(pipeline_device, self._device, links, self._clock.offset_s)

    def end(self, recorder: StepRecorder) -> None:
        """End the step of ``recorder``."""
        self._done.append((self._step, recorder.finish()))
        if self._step == self._steps[-1]:
            self.close()

    @property
    def missed(self) -> str:
        """Warning that no traced step was reached and no file was written; empty otherwise."""
        if self._done or self._folder is None:
            return ""
        first, last = self._steps[0], self._steps[-1]
        return (
            f"{self._folder / FILE} was not written: the run made {self._step} step(s); steps "
            f"{first} to {last}, counted from 1, were to be traced"
        )

    def close(self) -> None:
        """Write the trace, unless already written."""
        if self._is_written or not self._done or self._folder is None:
            return
        self._is_written = True
        trace = self.collect()
        if self._group is None or self._group.rank() + 1 == self._group.size():
            save_trace(trace, self._folder / FILE)

    def collect(self) -> Trace:
        """Merge the traces of all devices. Collective."""
        own = self._done, device_name(self._device)
        found = [own] if self._group is None else gather_objects(own, self._group)
        gathered, names = [done for done, _ in found], dict.fromkeys(name for _, name in found)
        schedule = self._traced.schedule
        return Trace(
            machine={"device": BETWEEN_DEVICES.join(names), **describe_host()},
            world=self._traced.world,
            plan_digest=self._traced.plan_digest,
            backbone=self._traced.backbone,
            schedule=schedule.name,
            placement=schedule.placement.kind.name,
            device_of_stage=schedule.placement.device_of_stage,
            num_microbatches=schedule.num_microbatches,
            clock=self._clock.method,
            clock_accuracy_s=self._clock.accuracy_s,
            steps=tuple(
                merge_step(parts[0][0], tuple(step for _, step in parts))
                for parts in zip(*gathered, strict=True)
            ),
            stages=self._traced.stages,
            run={**self._traced.run, "threads": str(num_threads(self._device))},
        )


def describe_host() -> dict[str, str]:
    """Description of this host that affects times: processors, versions."""
    return {
        "processors": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
