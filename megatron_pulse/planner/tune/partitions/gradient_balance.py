"""Partitions that trade compute load against gradient reduction on the heaviest device.

A step ends when the device with the most parameters has reduced its gradients over the replicas. It
takes about M times the largest load plus the reduction on the heaviest device. Partitions of least
load are one end of the trade-off, partitions of even parameters the other. In between, a limit on
the parameters per device is lowered step by step, as long as the estimated step time falls. Each
partition has the least load under its limit. Local search then moves cuts of the best partition
(``partition.moves``) as long as the estimate improves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from math import inf

from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import PartitionError, one_stage_per_device
from megatron_pulse.planner.partition.neighbourhood import descent
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.estimate import Estimator
from megatron_pulse.planner.tune.partitions.feasible import FeasiblePartitioner
from megatron_pulse.planner.tune.stages import Stages

LIGHTER = 0.9
"""Factor by which the parameter limit is lowered from one partition to the next."""

EVEN = 1.01
"""Ratio to an even share of the parameters below which no lighter partition is searched."""

WORTH = 0.01
"""Share of a step that even parameters must be able to save before lighter partitions are
searched."""

PATIENCE = 2
"""Partitions in a row without improvement after which the search stops."""

MOVES, FIRST_MOVES, GAIN = 400, 100, 1e-4
"""Estimates of moved cuts per config, the same for a first look, and the share of a step that a
move must save."""

BEST = 2
"""Lighter partitions that are simulated per config, best estimate first."""


class GradientBalancer:
    """Partitions that balance compute load against gradient reduction, by their estimates.

    Searches are cached: a config's quick partitions and its own often ask for the same ones.
    """

    def __init__(self, feasible: FeasiblePartitioner, estimator: Estimator) -> None:
        self.feasible, self.estimator = feasible, estimator
        self.partitioner, self.planner = feasible.partitioner, feasible.planner
        self.stages, self.costs = self.planner.stages, self.planner.costs
        self._balanced_of = lru_cache(maxsize=1024)(self._find_balanced)
        self._descended = lru_cache(maxsize=1024)(self._descend)

    def quick_partitions(self, config: Config, near_s: float = float("inf")) -> list[Partition]:
        """Partitions that are quick to find, ignoring memory. Raises UnfitError if there is none.

        The first has about the least load. With recomputation as needed, and if anything is
        recomputed, the least load under full recomputation is added. A partition with balanced
        gradients follows if its estimate is better; local search improves the partition if the
        estimate is below ``near_s``.
        """
        free = self.partitioner.unconstrained_partition(config)
        found = [free]
        if config.recompute.as_needed and self.planner.cut(config, free).activations.recomputes:
            always = replace(config, recompute=Recompute.ALWAYS)
            found.append(self.partitioner.unconstrained_partition(always))
        lighter = self._balanced_of(config, free, one_stage_per_device(config.placement))
        if lighter:
            stages = self.planner.cut(config, lighter[0])
            if self.estimator.cut_estimate(config, stages) < near_s:
                lighter = [self._descended(config, lighter[0], FIRST_MOVES)]
        return list(dict.fromkeys((*found, *lighter[:1])))

    def balanced_partitions(self, config: Config) -> list[Partition]:
        """Partitions with fewer parameters on the heaviest device than the config's own, best
        estimates first.

        Empty where gradients are not reduced over replicas, or the reduction is short.
        """
        own = self.feasible.best(config).partition
        lighter = self._balanced_of(config, own, config.placement)
        moved = [self._descended(config, cuts, MOVES) for cuts in lighter[:1]]
        return [cuts for cuts in dict.fromkeys((*moved, *lighter)) if cuts != own][:BEST]

    def _find_balanced(self, config: Config, cuts: Partition, spread: Placement) -> list[Partition]:
        """Lighter partitions with a shorter estimated step than ``cuts``, shortest first.

        Each is the best over the placement ``spread`` under its parameter limit. Returns ``cuts``
        alone if none is better, and an empty list if even parameters would gain nothing.
        """
        free = self.planner.cut(config, cuts)
        trained = free.per_device(free.trained)
        held, even = max(trained), sum(trained) / len(trained)
        estimate = self.estimator.cut_estimate
        about_s = estimate(config, free)
        if config.replicas == 1 or estimate(config, free, even) > (1 - WORTH) * about_s:
            return []
        own_s = least_s = self.estimator.timed_estimate(config, free)
        costs = self.partitioner.chains_over(config, self.costs.activations(config), spread)
        goal = self.partitioner.goal(config)
        found, gainless = dict[Partition, float](), 0
        while held > EVEN * even and gainless < PATIENCE:
            most = LIGHTER * held if LIGHTER * held > even else (held + even) / 2
            each = most * config.pipeline / spread.num_devices
            rule = MemoryRule(each, 1.0, (0.0,) * spread.num_stages, 0.0)
            try:
                lighter = self.partitioner.find_within(rule, costs, spread, goal)
            except PartitionError:
                break
            stages = self.planner.cut(config, Partition(config.placement, lighter.cuts))
            held = max(stages.per_device(stages.trained))
            step_s = self.estimator.timed_estimate(config, stages)
            gainless = 0 if step_s < least_s else gainless + 1
            least_s = min(least_s, step_s)
            found[stages.partition] = step_s
        gaining = sorted((each for each in found if found[each] < own_s), key=found.__getitem__)
        return gaining or [cuts]

    def _descend(self, config: Config, cuts: Partition, left: int) -> Partition:
        """Local search from ``cuts`` over at most ``left`` estimates. A partition that fits stays
        one that fits."""
        if config.recompute.as_needed:  # recomputation would be chosen anew for each cut
            return cuts
        start = self.planner.cut(config, cuts)
        fits = self.stages.fits(start)

        def step_s(stages: Stages) -> float:
            if fits and not self.stages.fits(stages):
                return inf
            return self.estimator.timed_estimate(config, stages)

        moved = partial(self.partitioner.moved_stages, config)
        return descent(start, moved, step_s, iter(range(left)), GAIN).partition
