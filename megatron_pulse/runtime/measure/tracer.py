"""Traces some steps of a run: a recorder for each, and at the end one file of all devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_pulse.planner.observe.trace import DeviceStep, Trace, merge_step, save_trace
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.profile.measuring.machine import device_name, num_threads
from megatron_pulse.runtime.measure.clock import SharedClock, share_clock
from megatron_pulse.runtime.measure.recorder import StepRecorder
from megatron_pulse.runtime.messages.links import Links

FILE = "trace.json"


@dataclass(frozen=True)
class Traced:
    """What is run: the plan's digest, its backbone and schedule, how ranks are divided, the layers
    of each stage, and what else its times depend on (``Trace.run``)."""

    plan_digest: str
    backbone: Mapping[str, Any]
    schedule: Schedule
    world: Mapping[str, int]
    stages: tuple[tuple[str, ...], ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)


class Tracer:
    """Traces the steps ``steps``, counted from 1, of a pipeline; all devices make the same calls.

    ``group`` is the pipeline's (None: one device). With a ``folder`` the last device writes
    ``trace.json`` there when the last of the steps has ended, or in ``close``.
    """

    def __init__(
        self,
        steps: range,
        traced: Traced,
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

    def begin(self, links: Links | None) -> StepRecorder | None:
        """A training step begins; its recorder, or None if it is not traced."""
        self._step += 1
        if self._step not in self._steps:
            return None
        pipeline_device = self._group.rank() if self._group is not None else 0
        return StepRecorder(pipeline_device, self._device, links, self._clock.offset_s)

    def end(self, recorder: StepRecorder) -> None:
        """The step of ``recorder`` has ended."""
        self._done.append((self._step, recorder.finish()))
        if self._step == self._steps[-1]:
            self.close()

    @property
    def missed(self) -> str:
        """That none of the steps came, and so there is no file; empty where one did."""
        if self._done or self._folder is None:
            return ""
        first, last = self._steps[0], self._steps[-1]
        return (
            f"{self._folder / FILE} was not written: of this run's {self._step} step(s), counted "
            f"from 1, steps {first} to {last} were to be traced"
        )

    def close(self) -> None:
        """Write what has been traced, unless that was done."""
        if self._is_written or not self._done or self._folder is None:
            return
        self._is_written = True
        trace = self.collect()
        if self._group is None or self._group.rank() + 1 == self._group.size():
            save_trace(trace, self._folder / FILE)

    def collect(self) -> Trace:
        """What has been traced on all devices. Collective."""
        gathered = [self._done]
        if self._group is not None:
            gathered = [self._done] * self._group.size()
            dist.all_gather_object(gathered, self._done, group=self._group)
        schedule = self._traced.schedule
        return Trace(
            machine=describe_machine(self._device),
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


def describe_machine(device: torch.device) -> dict[str, str]:
    """What the times depend on, as texts: device, processors, versions."""
    return {
        "device": device_name(device),
        "processors": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
