"""Where a config's chain is cut without regard to memory, and what stages by given cuts are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition, Placement, fold, sequential
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.moves import moves
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.memory.sparing import Sparing
from megatron_pulse.planner.tune.stages import Stages, busiest_link_s

type CostsKey = tuple[int, frozenset[int], int, frozenset[int]]
"""What a chain's costs depend on: microbatch size, what is computed again, tensor degree, and of
what that is cheap."""

NEAR = 0.02
"""How far above the least or an even load one is that counts as near it, as a share."""

NEARER = 0.005, 0.01
"""And others, where cuts are found at once."""


class Cuts(Sparing):
    """One backbone's chain on one cluster, cut in several ways.

    Arguments are those of ``Costs``.
    """

    @cached_property
    def _cut_of(self) -> Callable[[Config, Partition], Stages]:
        return lru_cache(maxsize=4096)(self._make_cut)

    @cached_property
    def _goals(self) -> dict[tuple[CostsKey, Placement, Goal], Goal]:
        return {}

    @cached_property
    def _partition_of(
        self,
    ) -> Callable[[CostsKey, Placement, Goal], Partition | PartitionError]:
        return lru_cache(maxsize=1024)(self._find_partition)

    def cut(self, config: Config, partition: Partition) -> Stages:
        """The config's stages by these cuts, whether or not they fit; of as few layers as are
        needed activations are computed again, where it says so."""
        bears = what_bears(config)
        found = self._cut_of(bears, partition)
        if config.split and config.recompute.as_needed and not self.fits(found, split=True):
            found = self._cut_of(replace(bears, split=True), partition)  # for what waits
        return found

    def free_cuts(self, config: Config) -> Partition:
        """Cuts of about the least load, whatever memory; raises UnfitError for none."""
        return self._free_cuts(config, self._goal(config))

    def level_cuts(self, config: Config) -> list[Partition]:
        """Cuts with the least largest stage, whatever memory; raises UnfitError for none.

        Several stages of a device wait less for each other where all are alike.
        """
        goal = replace(self._goal(config), order=("stage", "load"))
        return [self._best_cuts(config, config.placement, goal)]

    def near_cuts(self, config: Config) -> list[Partition]:
        """Of those with about the least load the cuts with the least largest stage; in a fold,
        whose cuts are soon found, as near to it by several measures: which is the best a
        simulation says (SDXL over 8 of 64 A100s of 24 GB: 316, 331 and 282 samples/s)."""
        own = self._goal(config)
        shares = NEARER if config.layout.num_chunks == 2 and config.placement.kind.mirrored else ()
        found = [
            self._best_cuts(config, config.placement, replace(own, slack=share))
            for share in (*shares, NEAR)
        ]
        return list(dict.fromkeys(found))

    def moved_cuts(self, config: Config, partition: Partition) -> Iterator[Partition]:
        """Legal cuts that differ by one cut moved by some layers, the nearest first, then by all or
        two moved by one."""
        for cuts in moves(partition.cuts):
            moved = Partition(config.placement, cuts)
            if _is_legal(self.costs(config), moved, config.layout.collocates):
                yield moved

    def moved_stages(self, config: Config, stages: Stages) -> Iterator[Stages]:
        """The config's stages by moved cuts, whether or not they fit."""
        return (self.cut(config, cuts) for cuts in self.moved_cuts(config, stages.partition))

    def _make_cut(self, config: Config, partition: Partition) -> Stages:
        if not config.recompute.as_needed:
            return self.cut_with(config, partition, self.relief(config))
        return self.cut_with(config, partition, self.needed(config, partition))

    def _best_cuts(self, config: Config, placement: Placement, goal: Goal) -> Partition:
        found = self._partition_of(self._costs_key(config), placement, goal)
        if isinstance(found, PartitionError):
            raise UnfitError(Unfit.PARTITION, f"{config}: {found}")
        return found

    def _costs_key(self, config: Config) -> CostsKey:
        relief = self.relief(config)
        return config.micro_batch_size, relief.again, config.tensor, relief.selective

    def _goal(self, config: Config) -> Goal:
        """What to cut for. Devices send while they compute: where loads with messages keep cuts
        from being even and links have time left, messages do not count."""
        home, ranks = config.placement.device_of_stage, self.ranks(config)
        goal = Goal(collocate=config.layout.collocates)
        links = {ranks.link(a, b) for a, b in zip(home, home[1:], strict=False) if a != b}
        if not links:
            return goal
        slowest = max(links, key=lambda link: (link.time_s(1 << 20), link.latency_s))
        return self._weighed(config, replace(goal, link=slowest))

    def _weighed(self, config: Config, goal: Goal) -> Goal:
        """The goal, or the one that counts no messages where its cuts have less to do on what is
        busiest; where some are computed again as needed, as if none were."""
        if config.recompute.as_needed:
            config = replace(config, recompute=Recompute.NEVER)
        key = self._costs_key(config), config.placement, goal
        if key not in self._goals:
            self._goals[key] = goal
            without = replace(goal, link=Link())
            with suppress(UnfitError):
                counted = self.cut(config, self._free_cuts(config, goal))
                if _may_ignore_messages(counted):
                    other = self.cut(config, self._free_cuts(config, without))
                    if other.busy_s(split=False) < counted.busy_s(split=False):
                        self._goals[key] = without
        return self._goals[key]

    def _free_cuts(self, config: Config, goal: Goal) -> Partition:
        """Cuts of about the least load, whatever memory; raises UnfitError for none.

        Several stages or pairs of stages of a device are cut as if each had one of its own. A stage
        for each device is cut at its best, which takes as little.
        """
        placement = config.placement
        if placement.num_chunks > 1:
            goal = replace(goal, order=("load",))
            with suppress(UnfitError):  # twice as many devices may leave a skip no legal place
                return Partition(placement, self._best_cuts(config, spread(placement), goal).cuts)
        return self._best_cuts(config, placement, goal)

    def _under(
        self, rule: MemoryRule, costs: ChainCosts, placement: Placement, goal: Goal
    ) -> Partition:
        """The best cut that keeps the rule; raises PartitionError."""
        return find_partition(costs, placement, replace(goal, memory=lambda _: rule), explain=False)

    def _find_partition(
        self, costs_key: CostsKey, placement: Placement, goal: Goal
    ) -> Partition | PartitionError:
        """The best cut without regard to memory, or why there is none; the same for many."""
        try:
            return find_partition(self._costs_of(*costs_key), placement, goal, explain=False)
        except PartitionError as error:
            return error


def _may_ignore_messages(stages: Stages) -> bool:
    """Whether the busiest device is one that computes, much above an even share, and messages are
    long enough for the cuts to have avoided some."""
    work_s = stages.work_s(split=False)
    sent_s = busiest_link_s(stages.partition.placement, stages.edges)
    even_s = sum(work_s) / len(work_s)
    return max(work_s) > (1 + NEAR) * even_s and NEAR * max(work_s) < sent_s < max(work_s)


def spread(placement: Placement) -> Placement:
    """Where every stage, or pair of stages, has a device of its own."""
    num = placement.num_stages
    return fold(num // 2) if placement.kind.mirrored and num > 1 else sequential(num)


def what_bears(config: Config) -> Config:
    """What bears on a config's stages: not split backwards, nor ample room where nothing is
    computed again."""
    key = replace(config, split=False)
    return key if config.recompute.as_needed else replace(key, ample=False)


def _is_legal(costs: ChainCosts, partition: Partition, collocate: bool) -> bool:
    """Whether skips stay on their devices where they have to, and each stage in its chain."""
    starts = tuple(partition.cuts[stage] for stage in partition.placement.starts)
    travels = collocate and any(crossing.skip for crossing in crossings(costs, partition))
    return starts == costs.starts and not travels
