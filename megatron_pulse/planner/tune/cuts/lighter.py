"""Cuts whose busiest device may have more to do where the heaviest has fewer gradients to sum.

A step ends when the device with the most parameters has summed its gradients over the replicas: it
takes about M times the largest load, and what the heaviest device sums. Cuts of the least load are
one end of what can be had, those of even parameters the other. Between them a limit on a device's
parameters is lowered from one cut to the next, each of the least load under its limit, as long as
the estimate of a step gains by it. The best of them then has cuts moved (``partition.moves``), as
long as the estimate gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import inf

from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import PartitionError
from megatron_pulse.planner.partition.moves import descended
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.cuts.free import spread
from megatron_pulse.planner.tune.estimate import Estimator
from megatron_pulse.planner.tune.stages import Stages

LIGHTER = 0.9
"""Times the parameters of the heaviest device that the next cuts may have."""

EVEN = 1.01
"""Times an even share of the parameters under which no lighter cuts are looked for."""

WORTH = 0.01
"""Of a step, what even parameters must be able to gain for lighter cuts to be looked for."""

PATIENCE = 2
"""Cuts in a row that gain nothing, after which no lighter ones are looked for."""

MOVES, FIRST_MOVES, GAIN = 400, 100, 1e-4
"""Estimates of moved cuts for a config, and for the first look at one, and the share of a step that
a move must gain."""

BEST = 2
"""Lighter cuts that are simulated for a config, the soonest by their estimates."""


class LighterCuts(Estimator):
    """A chain whose cuts weigh loads against sums of gradients."""

    def cheap_cuts(self, config: Config, near_s: float = float("inf")) -> list[Partition]:
        """Cuts of about the least load, whatever memory, and lighter ones where these promise a
        shorter step, moved where it is one of less than ``near_s``; where as much is computed again
        as is needed, and something is, also those of the least load where all is. Raises UnfitError
        for none."""
        free = self.free_cuts(config)
        found = [free]
        if config.recompute.as_needed and self.cut(config, free).relief.computes:
            found.append(self.free_cuts(replace(config, recompute=Recompute.ALWAYS)))
        lighter = self._lighter_of(config, free, spread(config.placement))
        if lighter and self.cut_estimate(config, self.cut(config, lighter[0])) < near_s:
            lighter = [self._descended(config, lighter[0], FIRST_MOVES)]
        return list(dict.fromkeys((*found, *lighter[:1])))

    def light_cuts(self, config: Config) -> list[Partition]:
        """Cuts with fewer parameters on the heaviest device than the config's own, those of the
        shortest steps by their estimates. None where gradients are not summed, or soon."""
        own = self.stages(config).partition
        lighter = self._lighter_of(config, own, config.placement)
        moved = [self._descended(config, cuts, MOVES) for cuts in lighter[:1]]
        return [cuts for cuts in dict.fromkeys((*moved, *lighter)) if cuts != own][:BEST]

    @cached_property
    def _lighter_of(self) -> Callable[[Config, Partition, Placement], list[Partition]]:
        """Often the same is asked for a config's cheap cuts and for its own."""
        return lru_cache(maxsize=1024)(self._find_lighter)

    @cached_property
    def _descended(self) -> Callable[[Config, Partition, int], Partition]:
        """The same."""
        return lru_cache(maxsize=1024)(self._descend)

    def _find_lighter(self, config: Config, cuts: Partition, spread: Placement) -> list[Partition]:
        """Lighter ones than ``cuts`` by which a step is estimated shorter, the shortest first, or
        ``cuts`` where none is; each is the best over ``spread`` under its limit. None where even
        parameters would gain nothing."""
        free = self.cut(config, cuts)
        trained = free.per_device(free.trained)
        held, even = max(trained), sum(trained) / len(trained)
        about_s = self.cut_estimate(config, free)
        if config.data == 1 or self.cut_estimate(config, free, even) > (1 - WORTH) * about_s:
            return []
        own_s = least_s = self.timed_estimate(config, free)
        costs, goal, found, gainless = self.costs(config), self._goal(config), {}, 0
        while held > EVEN * even and gainless < PATIENCE:
            most = LIGHTER * held if LIGHTER * held > even else (held + even) / 2
            each = most * config.pipeline / spread.num_devices
            rule = MemoryRule(each, 1.0, (0.0,) * spread.num_stages, 0.0)
            try:
                lighter = self._under(rule, costs, spread, goal)
            except PartitionError:
                break
            stages = self.cut(config, Partition(config.placement, lighter.cuts))
            held = max(stages.per_device(stages.trained))
            step_s = self.timed_estimate(config, stages)
            gainless = 0 if step_s < least_s else gainless + 1
            least_s = min(least_s, step_s)
            found[stages.partition] = step_s
        gaining = sorted((each for each in found if found[each] < own_s), key=found.__getitem__)
        return gaining or [cuts]

    def _descend(self, config: Config, cuts: Partition, left: int) -> Partition:
        """``cuts`` with some moved, and again, as long as a step is estimated shorter and what fits
        goes on to fit; after ``left`` estimates it is left at that."""
        if config.recompute.as_needed:  # what fits is worked out anew for each cut
            return cuts
        start = self.cut(config, cuts)
        fits = self.fits(start)

        def step_s(stages: Stages) -> float:
            return self.timed_estimate(config, stages) if self.fits(stages) or not fits else inf

        moved = partial(self.moved_stages, config)
        return descended(start, moved, step_s, iter(range(left)), GAIN).partition
