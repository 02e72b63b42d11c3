"""Priority queue of configs, and partitions to reuse."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.search.calibration import Calibration
from megatron_pulse.planner.tune.search.grouping import (
    LayoutKey,
    RankKey,
    SizeKey,
    layout_key,
    rank_key,
    size_key,
)
from megatron_pulse.planner.tune.stages import Stages

MOST_KNOWN = 4
"""Latest partitions kept per degree and layout."""


PROMISING = 1.25
"""Ratio to the shortest estimate above which the lower bounds of a group are not promising. The
estimate is made before partitioning."""


class Fidelity(IntEnum):
    """Fidelity level that a config has reached (table in ``search.fidelity``)."""

    EVEN = 0
    LIKE = 1
    CUT = 2
    QUICK = 3


@dataclass(order=True)
class Candidate:
    """Config in the queue.

    ``seconds`` is its estimate, or the expected step time after a longer schedule search.
    ``reached_s`` is the step time with its quick schedule.
    """

    seconds: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    step: Fidelity = Fidelity.EVEN
    stages: Stages | None = field(default=None, compare=False)
    reached_s: float = field(default=float("inf"), compare=False)

    @property
    def kind(self) -> LayoutKey:
        """Degree and layout."""
        return layout_key(self.config)

    @property
    def estimated_with(self) -> SizeKey | None:
        """Group whose simulations calibrate the estimate; None once it has a quick schedule."""
        return None if self.step is Fidelity.QUICK else size_key(self.config)

    def expected_s(self, calibration: Calibration) -> float:
        """Calibrated estimate in seconds."""
        size = self.estimated_with
        return self.seconds * (calibration.of_sizes(size) if size else 1.0)


class KnownCuts:
    """Partitions to try for other configs of the same degree and layout."""

    def __init__(self) -> None:
        self._cuts: dict[LayoutKey, list[Partition]] = {}

    def of(self, kind: LayoutKey) -> list[Partition]:
        """Latest partitions; empty if there are none."""
        return self._cuts.get(kind, [])

    def learn(self, kind: LayoutKey, cuts: Partition) -> None:
        """Remember a partition."""
        known = self.of(kind)
        if cuts not in known:
            self._cuts[kind] = [*known, cuts][-MOST_KNOWN:]


class Queue:
    """Candidates in order of their calibrated estimates."""

    def __init__(self, calibration: Calibration) -> None:
        self._corrections = calibration
        self._alike: dict[SizeKey | None, list[Candidate]] = {}

    def __bool__(self) -> bool:
        return bool(self._alike)

    def push(self, candidate: Candidate) -> None:
        """Insert a candidate."""
        heapq.heappush(self._alike.setdefault(candidate.estimated_with, []), candidate)

    def pop(self) -> Candidate:
        """Remove and return the candidate with the least expected time."""
        size = min(self._alike, key=lambda of: self._alike[of][0].expected_s(self._corrections))
        alike = self._alike[size]
        soonest = heapq.heappop(alike)
        if not alike:
            del self._alike[size]
        return soonest


def promising_first(kinds: Iterable[list[Candidate]]) -> list[list[Candidate]]:
    """Groups in order, those without a promising lower bound last."""
    found = [alike for alike in kinds if alike]
    most_s = PROMISING * min((min(alike).seconds for alike in found), default=0.0)
    return sorted(found, key=lambda alike: min(each.bound for each in alike) > most_s)


def by_ranks(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates grouped by ranks: configs of a group use the same links."""
    alike: dict[RankKey, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(rank_key(candidate.config), []).append(candidate)
    return list(alike.values())
