"""What a tuner's search takes up: configs, how far each has come, and cuts that are known."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.searching.corrections import Corrections
from megatron_pulse.planner.tune.searching.kinds import Kind, Ranks, Sized, kind_of, ranks_of, sized
from megatron_pulse.planner.tune.stages import Stages

MOST_KNOWN = 4
"""Cuts that are kept for a degree and layout, the latest."""


PROMISING = 1.25
"""Times the shortest estimate, from which on the bounds of a kind are not promising: the estimate
is made before anything is cut."""


class Reached(IntEnum):
    """How far a config has come (``searching.steps`` has the table)."""

    EVEN = 0
    LIKE = 1
    CUT = 2
    QUICK = 3


@dataclass(order=True)
class Candidate:
    """A config in the queue: ``seconds`` is its estimate, or what it may come to by its quick
    schedule, which takes ``reached_s``.
    """

    seconds: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    step: Reached = Reached.EVEN
    stages: Stages | None = field(default=None, compare=False)
    reached_s: float = field(default=float("inf"), compare=False)

    @property
    def kind(self) -> Kind:
        """That of its config."""
        return kind_of(self.config)

    @property
    def estimated_with(self) -> Sized | None:
        """Those whose simulations bear on its estimate; none where it has a quick schedule."""
        return None if self.step is Reached.QUICK else sized(self.config)

    def expected_s(self, corrections: Corrections) -> float:
        """What it is expected to take."""
        size = self.estimated_with
        return self.seconds * (corrections.of_sizes(size) if size else 1.0)


class KnownCuts:
    """Cuts that others of a kind are tried with."""

    def __init__(self) -> None:
        self._cuts: dict[Kind, list[Partition]] = {}

    def of(self, kind: Kind) -> list[Partition]:
        """The latest; none where none was learnt."""
        return self._cuts.get(kind, [])

    def learn(self, kind: Kind, cuts: Partition) -> None:
        """Try others of the kind with these too."""
        known = self.of(kind)
        if cuts not in known:
            self._cuts[kind] = [*known, cuts][-MOST_KNOWN:]


class Queue:
    """Candidates, the soonest first, by their corrected estimates."""

    def __init__(self, corrections: Corrections) -> None:
        self._corrections = corrections
        self._alike: dict[Sized | None, list[Candidate]] = {}

    def __bool__(self) -> bool:
        return bool(self._alike)

    def push(self, candidate: Candidate) -> None:
        """One more."""
        heapq.heappush(self._alike.setdefault(candidate.estimated_with, []), candidate)

    def pop(self) -> Candidate:
        """The soonest."""
        size = min(self._alike, key=lambda of: self._alike[of][0].expected_s(self._corrections))
        alike = self._alike[size]
        soonest = heapq.heappop(alike)
        if not alike:
            del self._alike[size]
        return soonest


def promising_first(kinds: Iterable[list[Candidate]]) -> list[list[Candidate]]:
    """Each kind's candidates, in their order but that kinds without a promising one come last
    (three in a pipeline and two replicas over 1 GbE, beside six in a pipeline)."""
    found = [alike for alike in kinds if alike]
    most_s = PROMISING * min((min(alike).seconds for alike in found), default=0.0)
    return sorted(found, key=lambda alike: min(each.bound for each in alike) > most_s)


def by_ranks(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Those of each tensor degree and way to share nodes, between which links differ."""
    alike: dict[Ranks, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(ranks_of(candidate.config), []).append(candidate)
    return list(alike.values())
