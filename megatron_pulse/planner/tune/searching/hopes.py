"""What steps may take by schedules that are searched for."""

from __future__ import annotations

from collections import defaultdict

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Outcome

HOPE, SURE = 0.5, 2
"""Part of the gap of a quick schedule that a search may close at least, until so many searches for
the config's other cuts were made."""


class Hopes:
    """How much of the gap between a quick schedule and its bound searches for better ones closed.

    For most configs it is little, for some all of it, whatever their cuts; where memory is short it
    is often less than nothing, by what is simulated of a step.
    """

    def __init__(self) -> None:
        self._quick: dict[tuple[Config, Partition], tuple[float, float]] = {}
        self._closed: defaultdict[Config, list[float]] = defaultdict(list)

    def simulated(self, quick: Outcome) -> None:
        """A step was simulated by a schedule that is found at once."""
        self._quick[_which(quick)] = quick.step_s, gap_s(quick)

    def searched(self, found: Outcome) -> None:
        """And by one that was searched for."""
        quick_s, wide_s = self._quick.get(_which(found), (0.0, 0.0))
        if wide_s > 0:
            self._closed[found.config].append((quick_s - found.step_s) / wide_s)

    def quick_s(self, outcome: Outcome) -> float | None:
        """What a step of its cuts takes by a schedule that is found at once, if it is known."""
        return self._quick.get(_which(outcome), (None,))[0]

    def of(self, quick: Outcome, cheap: bool) -> float:
        """What a step may take that was simulated by a quick schedule. ``cheap``: a search takes so
        little that all is hoped for where none is known of the config."""
        closed = self._closed.get(quick.config, [1.0] if cheap else [HOPE])
        part = max(closed) if len(closed) >= SURE else max(HOPE, *closed)
        return quick.step_s - max(0.0, part) * gap_s(quick)


def gap_s(outcome: Outcome) -> float:
    """Seconds between its pipeline and the bound of its schedule."""
    gap = outcome.synthesis.certificate.gap
    return outcome.pipeline_s * gap / (1 + gap)


def _which(outcome: Outcome) -> tuple[Config, Partition]:
    return outcome.config, outcome.stages.partition
