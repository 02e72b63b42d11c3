"""Memory-feasible partitions: cuts of a config that leave room for activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, takewhile
from math import inf

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.find import Goal, PartitionError
from megatron_pulse.planner.partition.neighbourhood import best_first, descent
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.memory.config_policy import stages_key_config
from megatron_pulse.planner.tune.partitions.least_load import Partitioner
from megatron_pulse.planner.tune.stages import Stages

SHARES = (1.0, 0.7, 0.4)
"""Shares of the full-rate in-flight microbatches for which memory-feasible partitions are
searched."""

MOVES = 200
"""Maximum number of moved partitions that are examined, with recomputation or if no partition
fits."""

STEEP = 16
"""Exponent p of the fullness measure, the sum over devices of (bytes / limit)^p. Local search
lowers the sum until the partition fits. A high exponent follows the fullest device and still
rewards emptier others."""


BESIDE = 0.01
"""Weight of the shorter of two times beside the longer, to break ties between partitions."""


class FeasiblePartitioner:
    """Partitions that fit the devices' memory.

    Local search ends early once ``stopped`` returns True.
    """

    def __init__(
        self, partitioner: Partitioner, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.partitioner, self.stopped = partitioner, stopped
        self.planner, self.costs = partitioner.planner, partitioner.costs
        self.stages = self.planner.stages
        self._stages_of = lru_cache(maxsize=4096)(self._make_stages)

    def best(self, config: Config) -> Stages:
        """Stages of the config's best memory-feasible partition. Raises UnfitError if there is
        none."""
        bears = stages_key_config(config)
        found = self._stages_of(bears)
        if config.split and isinstance(found, Stages) and not self.stages.fits(found, split=True):
            found = self._stages_of(replace(bears, split=True))  # deferred W holds more
        if isinstance(found, UnfitError):
            raise UnfitError(found.reason, found.detail)
        return found

    def alternatives(self, config: Config) -> list[Partition]:
        """Partitions that leave more room for activations than the config's own.

        The first holds all full-rate in-flight microbatches. Partitions for smaller shares follow
        as far as they differ. Empty if memory does not bind the config's own partition.
        """
        own, goal = self.best(config), self.partitioner.goal(config)
        found: list[Partition] = []
        for share in SHARES:
            if self.planner.holds(config, own, share):
                break
            with_room = self._with_room(config, goal, own, share)
            if isinstance(with_room, Partition) and with_room not in found:
                found.append(with_room)
        return found

    def _make_stages(self, config: Config) -> Stages | UnfitError:
        placement, goal = config.placement, self.partitioner.goal(config)
        found = self.partitioner.find(config, placement, goal)
        if isinstance(found, PartitionError):
            return UnfitError(Unfit.PARTITION, f"{config}: {found}")
        free = self.planner.cut(config, found)
        fitting = [free] * self.stages.fits(free, config.split)
        if fitting and not (free.activations.recomputes and config.recompute.as_needed):
            return free
        why: object = "no partition found has room for a microbatch on every device"
        for share in SHARES:
            with_room = self._with_room(config, goal, free, share)
            if isinstance(with_room, Partition):
                stages = self.planner.cut(config, with_room)
                fitting += [stages] * self.stages.fits(stages, config.split)
                if config.recompute.as_needed:
                    fitting += self._with_least_workspace(config, goal, free, share)
                break
            why = with_room
        if not fitting:
            with suppress(PartitionError):
                rule = self.planner.optimizer_rule(config)
                least = self.planner.cut(
                    config,
                    self.partitioner.find_within(rule, self.costs.chains(config), placement, goal),
                )
                fitting += [least] * self.stages.fits(least, config.split)
        if config.recompute.as_needed:
            fitting += self._as_if_all_recomputed(config)
        roomier = [] if fitting else self._roomier(config, goal, free)
        if not (fitting or roomier):
            return UnfitError(Unfit.ACTIVATIONS, f"{config}: {why}")
        fitting = self._moved(config, goal, fitting or roomier)
        return min(fitting, key=partial(self._period_s, config, goal))

    def _as_if_all_recomputed(self, config: Config) -> list[Stages]:
        """Best partitions of full (and selective) recomputation, with recomputation as needed.

        Their loads are even, and the recomputation needed then takes about as long on all devices.
        """
        found = []
        for again in (Recompute.ALWAYS, *[Recompute.SELECTIVE] * self.costs.profile.selects):
            with suppress(UnfitError):
                of_all = self.best(replace(config, recompute=again))
                stages = self.planner.cut(config, of_all.partition)
                found += [stages] * self.stages.fits(stages, config.split)
        return found

    def _roomier(self, config: Config, goal: Goal, free: Stages) -> list[Stages]:
        """Local search for a partition with room for one microbatch on every device.

        The first start counts the smallest working memory of any device for all devices. The second
        start are the free cuts. Returns an empty list if nothing fits within ``MOVES``.
        """
        starts = [free.partition]
        found = self._with_room(config, goal, free, 0.0, of=min)
        if isinstance(found, Partition):
            starts.insert(0, found)
        limits = free.usable_bytes

        def fullness(cuts: Partition) -> float:
            held = self.planner.cut(config, cuts).least_held(config.split)
            return sum((n / limit) ** STEEP for n, limit in zip(held, limits, strict=True))

        for start in starts:
            stages = self.planner.cut(config, start)
            if sum(stages.state_bytes) + sum(stages.saved_bytes) > sum(limits):
                continue
            moved = best_first(
                start, partial(self.partitioner.neighbour_partitions, config), fullness
            )
            for cuts in takewhile(lambda _: not self.stopped(), islice(moved, MOVES)):
                if self.stages.fits(stages := self.planner.cut(config, cuts), config.split):
                    return [stages]
        return []

    def _period_s(self, config: Config, goal: Goal, stages: Stages) -> float:
        """Seconds per microbatch: the larger of the busiest device's load and the memory bound,
        with a little of the smaller to break ties."""
        load_s = max(goal.evaluate(stages.costs, stages.partition).load_s)
        shorter, longer = sorted((load_s, self.planner.memory_bound_s(config, stages)))
        return longer + BESIDE * shorter

    def _moved(self, config: Config, goal: Goal, fitting: Sequence[Stages]) -> list[Stages]:
        """The partitions after local search, in order of their periods.

        Recomputation is chosen anew for each move, and as many microbatches stay in flight.
        """
        looks, holds = takewhile(lambda _: not self.stopped(), range(MOVES)), self.planner.holds

        def moved(stages: Stages) -> Stages:
            share = next((share for share in SHARES if holds(config, stages, share)), 0.0)

            def seconds(other: Stages) -> float:
                fits = self.stages.fits(other, config.split) and holds(config, other, share)
                return self._period_s(config, goal, other) if fits else inf

            return descent(stages, partial(self.partitioner.moved_stages, config), seconds, looks)

        return [moved(each) for each in sorted(fitting, key=partial(self._period_s, config, goal))]

    def _with_least_workspace(
        self, config: Config, goal: Goal, free: Stages, share: float
    ) -> list[Stages]:
        """Partition found with the smallest working memory of any device counted for all, if it
        then fits."""
        found = self._with_room(config, goal, free, share, of=min)
        if not isinstance(found, Partition):
            return []
        stages = self.planner.cut(config, found)
        fits = self.stages.fits(stages, config.split) and self.planner.holds(config, stages, share)
        return [stages] * fits

    def _with_room(
        self,
        config: Config,
        goal: Goal,
        free: Stages,
        share: float,
        of: Callable[[tuple[float, ...]], float] = max,
    ) -> Partition | PartitionError:
        """Partition with room for ``share`` of the full-rate in-flight microbatches, or why there
        is none.

        With recomputation as needed, bisection finds the fewest recomputed layers
        (``ActivationPlanner.levels``) that give a feasible partition; each device then chooses its
        own layers. Messages and working memory are taken to need the same bytes on every device.
        ``of`` computes that number from the bytes per device of the ``free`` cuts.
        """
        placement, levels = config.placement, [self.costs.activations(config)]
        if config.recompute.as_needed:
            levels = self.planner.levels(config)
        low, high = 0, len(levels) - 1
        found: Partition | PartitionError = PartitionError("no partition has room for activations")
        while low <= high:
            middle = (low + high) // 2
            costs = self.costs.chains(config, levels[middle])
            beside = self.stages.build(config, free.partition, levels[middle])
            rule = self.planner.memory_rule(config, share, of(beside.transient_bytes(config.split)))
            try:
                found = self.partitioner.find_within(rule, costs, placement, goal)
                high = middle - 1
            except PartitionError as error:
                if not isinstance(found, Partition):
                    found = error
                low = middle + 1
        return found
