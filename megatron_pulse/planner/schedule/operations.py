"""A schedule is data: per device an ordered list of operations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from megatron_pulse.planner.placement import Placement


class Kind(StrEnum):
    """What an operation computes; the values are the letters of the text form."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, order=True)
class Operation:
    """One stage on one microbatch. Text form ``F2:7``: forward, stage 2, microbatch 7."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}:{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """The operation written as ``F2:7``; raises ValueError for anything else."""
        match = re.fullmatch(r"([FB])(\d+):(\d+)", text.strip())
        if match is None:
            raise ValueError(f"not an operation: {text!r}; expected for example F2:7")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """``order[d]`` is what device ``d`` executes, in order."""

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Operation, ...], ...]

    def forward_only(self) -> Schedule:
        """The same schedule without its backward operations (evaluation)."""
        return Schedule(
            self.name,
            self.placement,
            self.num_microbatches,
            tuple(tuple(op for op in ops if op.kind is Kind.FORWARD) for ops in self.order),
        )
