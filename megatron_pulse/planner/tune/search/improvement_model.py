"""Expected gain of a longer schedule search."""

from __future__ import annotations

from collections import defaultdict

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Outcome

PRIOR, SURE = 0.5, 2
"""Assumed minimum share of a quick schedule's gap that a search closes.

The second number is how many searches for a config's other partitions replace the assumption.
"""


class ImprovementModel:
    """Measured shares of the gap between quick schedules and their bounds that searches closed.

    The share depends on the config more than on its cuts: mostly small, sometimes all. Under low
    memory it is often negative.
    """

    def __init__(self) -> None:
        self._quick: dict[tuple[Config, Partition], tuple[float, float]] = {}
        self._closed: defaultdict[Config, list[float]] = defaultdict(list)

    def simulated(self, quick: Outcome) -> None:
        """Record a step with a quick schedule."""
        self._quick[_which(quick)] = quick.step_s, gap_s(quick)

    def searched(self, found: Outcome) -> None:
        """Record a step with a searched schedule."""
        quick_s, wide_s = self._quick.get(_which(found), (0.0, 0.0))
        if wide_s > 0:
            self._closed[found.config].append((quick_s - found.step_s) / wide_s)

    def quick_s(self, outcome: Outcome) -> float | None:
        """Step time with a quick schedule, if known."""
        return self._quick.get(_which(outcome), (None,))[0]

    def of(self, quick: Outcome, cheap: bool) -> float:
        """Expected step time after a schedule search.

        ``cheap`` searches are so short that the whole gap counts if nothing is known of the config.
        """
        closed = self._closed.get(quick.config, [1.0] if cheap else [PRIOR])
        part = max(closed) if len(closed) >= SURE else max(PRIOR, *closed)
        return quick.step_s - max(0.0, part) * gap_s(quick)


def gap_s(outcome: Outcome) -> float:
    """Seconds between the pipeline's makespan and the bound of its schedule."""
    gap = outcome.synthesis.certificate.gap
    return outcome.pipeline_s * gap / (1 + gap)


def _which(outcome: Outcome) -> tuple[Config, Partition]:
    return outcome.config, outcome.stages.partition
