"""A schedule is data: per device an ordered list of operations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_pulse.faults import told
from megatron_pulse.planner.layout.placement import Placement


class Kind(StrEnum):
    """What an operation computes; the values are the letters of the text form.

    A backward pass is one operation, or an input gradient and, later, a weight gradient. Where
    activations are computed again that is part of it, or an operation of its own before it. Those
    that wait on the host leave when their forward ends; O is where that must be done, and their
    memory is free, L where they begin to come back. A filler is no part of the backbone (frozen
    encoders, for instance): it runs where a device would idle.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    OFFLOAD = "O"
    RELOAD = "L"
    FILLER = "X"

    __hash__ = str.__hash__  # millions of times in a search; an Enum's own is slow

    @property
    def live(self) -> int:
        """By how much the operation changes the number of live activations on its device."""
        return {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}.get(self, 0)

    @property
    def passes(self) -> bool:
        """Whether it is on its microbatch's way through the stages, there and back."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD)

    @property
    def is_optional(self) -> bool:
        """Whether a step is complete without it."""
        return self in (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD, Kind.FILLER)

    @property
    def copies(self) -> bool:
        """Whether it computes nothing, and is there for what travels between device and host."""
        return self in (Kind.OFFLOAD, Kind.RELOAD)


BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
"""The backward pass of a stage, as far as another stage waits for it."""


class Operation(NamedTuple):
    """One stage on one microbatch. Text form ``F2:7``: forward, stage 2, microbatch 7.

    Of a filler ``stage`` is its number and ``microbatch`` the slice of its work.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}:{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """The operation written as ``F2:7``; raises ValueError for anything else."""
        match = re.fullmatch(r"([FBIWROLX])(0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,8})", text.strip())
        if match is None:
            raise ValueError(f"not an operation: {text[:60]!r}; expected for example F2:7")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


class Need(NamedTuple):
    """Slice ``number`` of filler ``filler``, whose result is where it is needed ``lag`` later."""

    filler: int
    number: int
    lag: float


@dataclass(frozen=True)
class Filler:
    """Work in slices for which nothing in the step waits but other slices.

    ``slice_seconds[i]`` is how long slice i takes, in the unit of the stages' durations; each runs
    on one of ``devices`` (None: any), after ``needs[i]`` (empty: no slice waits for another).
    ``pieces[i]`` says what it is of a frozen component: first layer, layer after the last, first
    sample, sample after the last (empty: not said); the results of its last layers go to
    ``readers`` before the next step. Raises ValueError with every fault.
    """

    name: str
    slice_seconds: tuple[float, ...]
    devices: tuple[int, ...] | None = None
    pieces: tuple[tuple[int, int, int, int], ...] = ()
    needs: tuple[tuple[Need, ...], ...] = ()
    readers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if not self.slice_seconds:
            faults.append("it has no slices")
        if not all(math.isfinite(time) and time > 0 for time in self.slice_seconds):
            faults.append("the times of its slices must be finite and positive")
        if self.devices is not None and not self.devices:
            faults.append("there is no device that it may run on")
        for name in ("pieces", "needs"):
            if (count := len(getattr(self, name))) not in (0, len(self.slice_seconds)):
                faults.append(f"{name} are of {count} slices, there are {len(self.slice_seconds)}")
        if not all(0 <= need.lag < math.inf for needs in self.needs for need in needs):
            faults.append("the lags of its needs must be finite and not negative")
        if faults:
            raise ValueError(told(f"filler {self.name!r}", faults))

    def finishes(self, number: int) -> bool:
        """Whether a slice has the last of the component's layers."""
        return self.pieces[number][1] == max(last for _, last, _, _ in self.pieces)

    def may_run_on(self, device: int) -> bool:
        """Whether ``device`` is one of its own."""
        return self.devices is None or device in self.devices


@dataclass(frozen=True)
class Schedule:
    """The order of every device's operations: ``order[d]`` is what device ``d`` executes.

    Every operation of every microbatch is in it once. ``X2:7`` is slice 7 of ``fillers[2]``; every
    slice of every filler is there once.
    """

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Operation, ...], ...]
    fillers: tuple[Filler, ...] = ()

    def slices_before(self, operation: Operation) -> Iterator[tuple[Operation, float]]:
        """The slices for which a slice waits, and how long after their ends it can start."""
        if operation.kind is Kind.FILLER and operation.stage < len(self.fillers):
            needs = self.fillers[operation.stage].needs
            if operation.microbatch < len(needs):
                for need in needs[operation.microbatch]:
                    yield Operation(Kind.FILLER, need.filler, need.number), need.lag

    @cached_property
    def recomputed_apart(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose activations an operation of its own computes again."""
        every = (op for ops in self.order for op in ops)
        return frozenset((op.stage, op.microbatch) for op in every if op.kind is Kind.RECOMPUTE)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose activations wait on the host."""
        every = (op for ops in self.order for op in ops)
        return frozenset((op.stage, op.microbatch) for op in every if op.kind is Kind.OFFLOAD)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What every stage does with every microbatch, in that order; what is optional does not
        count.

        Only forwards in an evaluation; a schedule splits every backward pass or none.
        """
        used = {op.kind for ops in self.order for op in ops}
        if used & {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}:
            return (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        return (Kind.FORWARD, Kind.BACKWARD) if Kind.BACKWARD in used else (Kind.FORWARD,)

    def forward_only(self) -> Schedule:
        """The same schedule without its backward operations and fillers (evaluation).

        Fillers prepare the next step of training; an evaluation has no idle time set aside for it.
        """
        return Schedule(
            self.name,
            self.placement,
            self.num_microbatches,
            tuple(tuple(op for op in ops if op.kind is Kind.FORWARD) for ops in self.order),
        )
