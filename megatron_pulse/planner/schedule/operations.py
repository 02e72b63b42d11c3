"""Operations and schedules: a schedule is an ordered list of operations per device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_pulse.errors import format_faults
from megatron_pulse.planner.layout.placement import Placement


class OpType(StrEnum):
    """Operation type; the values are the letters of the text form.

    A backward pass is one operation (B), or an input gradient (I) and, later, a weight gradient
    (W). Recomputation is part of the backward, or a separate operation before it (R). Offload
    copies begin when the forward ends. O is the point at which the copy to the host must have ended
    and the memory is free; L is the point at which the copy back begins. A bubble task (X) is not
    part of the backbone (frozen encoders, for instance): it runs where a device would idle.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    OFFLOAD = "O"
    RELOAD = "L"
    BUBBLE_TASK = "X"

    __hash__ = str.__hash__  # millions of calls in a search; an Enum's own is slow

    @property
    def live(self) -> int:
        """Change of the number of live activations on the device."""
        return {OpType.FORWARD: 1, OpType.BACKWARD: -1, OpType.WEIGHT_GRAD: -1}.get(self, 0)

    @property
    def passes(self) -> bool:
        """True if the operation is on its microbatch's path through the stages, forward and
        back."""
        return self in (OpType.FORWARD, OpType.BACKWARD, OpType.INPUT_GRAD)

    @property
    def is_optional(self) -> bool:
        """True if a step is complete without the operation."""
        return self in (OpType.RECOMPUTE, OpType.OFFLOAD, OpType.RELOAD, OpType.BUBBLE_TASK)

    @property
    def copies(self) -> bool:
        """True if the operation computes nothing, and marks a copy between device and host."""
        return self in (OpType.OFFLOAD, OpType.RELOAD)


BACKWARDS = (OpType.BACKWARD, OpType.INPUT_GRAD)
"""Operation types of the backward pass that other stages wait for."""


class Operation(NamedTuple):
    """One stage on one microbatch. Text form ``F2:7``: forward, stage 2, microbatch 7.

    For a bubble task ``stage`` is its number and ``microbatch`` the slice of its work.
    """

    kind: OpType
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}:{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Parse ``F2:7``; raises ValueError for anything else."""
        match = re.fullmatch(r"([FBIWROLX])(0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,8})", text.strip())
        if match is None:
            raise ValueError(f"not an operation: {text[:60]!r}; expected for example F2:7")
        return cls(OpType(match[1]), int(match[2]), int(match[3]))


class SliceDependency(NamedTuple):
    """Dependency on slice ``number`` of bubble task ``task``, whose result arrives ``lag``
    later."""

    task: int
    number: int
    lag: float


@dataclass(frozen=True)
class BubbleTask:
    """Bubble task: work in slices that nothing in the step depends on, except other slices.

    ``slice_seconds[i]`` is the duration of slice i, in the unit of the stages' durations. A slice
    runs on one of ``devices`` (None: any), after its dependencies ``deps[i]`` (empty: no
    dependencies). ``slices[i]`` is the slice's part of a frozen component: first layer, layer after
    the last, first sample, sample after the last (empty: unknown). The results of the last layers
    go to ``consumers`` before the next step. Raises ValueError with every fault.
    """

    name: str
    slice_seconds: tuple[float, ...]
    devices: tuple[int, ...] | None = None
    slices: tuple[tuple[int, int, int, int], ...] = ()
    deps: tuple[tuple[SliceDependency, ...], ...] = ()
    consumers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if not self.slice_seconds:
            faults.append("it has no slices")
        if not all(math.isfinite(time) and time > 0 for time in self.slice_seconds):
            faults.append("the times of its slices must be finite and positive")
        if self.devices is not None and not self.devices:
            faults.append("devices is empty: no device may run it")
        for name in ("slices", "deps"):
            if (count := len(getattr(self, name))) not in (0, len(self.slice_seconds)):
                faults.append(f"{name} has {count} entries for {len(self.slice_seconds)} slices")
        if not all(0 <= dep.lag < math.inf for deps in self.deps for dep in deps):
            faults.append("the lags of its deps must be finite and not negative")
        if faults:
            raise ValueError(format_faults(f"bubble task {self.name!r}", faults))

    def finishes(self, number: int) -> bool:
        """True if slice ``number`` contains the last of the component's layers."""
        return self.slices[number][1] == max(last for _, last, _, _ in self.slices)

    def may_run_on(self, device: int) -> bool:
        """True if the task may run on ``device``."""
        return self.devices is None or device in self.devices


@dataclass(frozen=True)
class Schedule:
    """Order of every device's operations: ``order[d]`` is the order of device ``d``.

    Every operation of every microbatch is in it once. ``X2:7`` is slice 7 of ``bubble_tasks[2]``;
    every slice of every bubble task is there once.
    """

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Operation, ...], ...]
    bubble_tasks: tuple[BubbleTask, ...] = ()

    def slices_before(self, operation: Operation) -> Iterator[tuple[Operation, float]]:
        """Slices that a slice depends on, with the lags after their ends."""
        if operation.kind is OpType.BUBBLE_TASK and operation.stage < len(self.bubble_tasks):
            deps = self.bubble_tasks[operation.stage].deps
            if operation.microbatch < len(deps):
                for dep in deps[operation.microbatch]:
                    yield Operation(OpType.BUBBLE_TASK, dep.task, dep.number), dep.lag

    @cached_property
    def recomputed_apart(self) -> frozenset[tuple[int, int]]:
        """Stages and microbatches with recomputation as a separate operation (R)."""
        every = (op for ops in self.order for op in ops)
        return frozenset((op.stage, op.microbatch) for op in every if op.kind is OpType.RECOMPUTE)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """Stages and microbatches whose activations are offloaded."""
        every = (op for ops in self.order for op in ops)
        return frozenset((op.stage, op.microbatch) for op in every if op.kind is OpType.OFFLOAD)

    @property
    def kinds(self) -> tuple[OpType, ...]:
        """Operation types of every stage and microbatch, in order, without optional ones.

        An evaluation has only forwards. A schedule splits every backward pass or none.
        """
        used = {op.kind for ops in self.order for op in ops}
        if used & {OpType.INPUT_GRAD, OpType.WEIGHT_GRAD}:
            return (OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
        return (OpType.FORWARD, OpType.BACKWARD) if OpType.BACKWARD in used else (OpType.FORWARD,)

    def forward_only(self) -> Schedule:
        """The same schedule without its backward operations and bubble tasks (evaluation).

        Bubble tasks prepare the next training step; an evaluation has no bubbles for them.
        """
        return Schedule(
            self.name,
            self.placement,
            self.num_microbatches,
            tuple(tuple(op for op in ops if op.kind is OpType.FORWARD) for ops in self.order),
        )
