"""Partitions of a config without regard to memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import (
    Goal,
    PartitionError,
    find_partition,
    one_stage_per_device,
)
from megatron_pulse.planner.partition.neighbourhood import neighbours
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.memory.config_policy import ActivationPlanner
from megatron_pulse.planner.tune.stages import Stages, busiest_link_s

type CostsKey = tuple[tuple[int, int, int], ActivationPolicies, tuple[tuple[str, ...], ...]]
"""Key of a chain's costs: work of a rank, activation policies, and the kinds of each device."""

NEAR = 0.02
"""Relative distance within which a load counts as near the minimum or near an even share."""

NEARER = 0.005, 0.01
"""Further such distances, for layouts whose partitions are found quickly."""


class Partitioner:
    """Partitions of least load, whether or not they fit, and the partitions near a given one."""

    def __init__(self, planner: ActivationPlanner) -> None:
        self.planner, self.costs = planner, planner.costs
        self._goals: dict[tuple[CostsKey, Placement, Goal], Goal] = {}
        self._partition_of = lru_cache(maxsize=1024)(self._find_partition)

    def unconstrained_partition(self, config: Config) -> Partition:
        """Partition of about the least load, ignoring memory. Raises UnfitError if there is
        none."""
        return self._free_cuts(config, self.goal(config))

    def even_stage_partitions(self, config: Config) -> list[Partition]:
        """Partition with the smallest largest stage, ignoring memory. Raises UnfitError if there is
        none.

        Stages that share a device wait less for each other when all stages are alike.
        """
        goal = replace(self.goal(config), order=("stage", "load"))
        return [self._best_cuts(config, config.placement, goal)]

    def near_optimal_partitions(self, config: Config) -> list[Partition]:
        """Partitions with the smallest largest stage among those of about the least load.

        A fold with two chunks per device gets one partition for each of several distances from the
        least load. Its partitions are found quickly, and only a simulation tells which is best.
        """
        own = self.goal(config)
        shares = NEARER if config.layout.num_chunks == 2 and config.placement.kind.mirrored else ()
        found = [
            self._best_cuts(config, config.placement, replace(own, slack=share))
            for share in (*shares, NEAR)
        ]
        return list(dict.fromkeys(found))

    def neighbour_partitions(self, config: Config, partition: Partition) -> Iterator[Partition]:
        """Legal partitions in the neighbourhood: one cut moved by some layers, the nearest first,
        then all cuts or two cuts moved by one layer."""
        for cuts in neighbours(partition.cuts):
            moved = Partition(config.placement, cuts)
            if _is_legal(self.costs.chain(config), moved, config.layout.collocates):
                yield moved

    def moved_stages(self, config: Config, stages: Stages) -> Iterator[Stages]:
        """Stages of the partitions in the neighbourhood, whether or not they fit."""
        return (
            self.planner.cut(config, cuts)
            for cuts in self.neighbour_partitions(config, stages.partition)
        )

    def find(self, config: Config, placement: Placement, goal: Goal) -> Partition | PartitionError:
        """Best partition for the goal, ignoring memory, or the reason why there is none. Many
        configs share the result."""
        return self._partition_of(self._costs_key(config, placement), placement, goal)

    def chains_over(
        self, config: Config, activations: ActivationPolicies, placement: Placement
    ) -> tuple[ChainCosts, ...]:
        """Chain costs on each device of ``placement``, whose stages are those of the config."""
        of = *config.work_of_rank, activations
        return tuple(self.costs.chain_at(*of, kinds) for kinds in self._kinds(config, placement))

    def _kinds(self, config: Config, placement: Placement) -> tuple[tuple[str, ...], ...]:
        home = config.placement.device_of_stage
        return tuple(
            self.costs.kinds_at(config, home[placement.stages_of_device(device)[0]])
            for device in range(placement.num_devices)
        )

    def find_within(
        self, rule: MemoryRule, costs: Sequence[ChainCosts], placement: Placement, goal: Goal
    ) -> Partition:
        """Best partition for the goal that keeps the rule, with the ``costs`` on each device.
        Raises PartitionError if there is none."""
        return find_partition(costs, placement, replace(goal, memory=lambda _: rule), explain=False)

    def _best_cuts(self, config: Config, placement: Placement, goal: Goal) -> Partition:
        found = self.find(config, placement, goal)
        if isinstance(found, PartitionError):
            raise UnfitError(Unfit.PARTITION, f"{config}: {found}")
        return found

    def _costs_key(self, config: Config, placement: Placement) -> CostsKey:
        activations, kinds = self.costs.activations(config), self._kinds(config, placement)
        return config.work_of_rank, activations, kinds

    def goal(self, config: Config) -> Goal:
        """Goal of the partition search.

        Devices send while they compute. Messages therefore do not count where they would keep the
        cuts from an even load although links have time left.
        """
        home, ranks = config.placement.device_of_stage, self.costs.ranks(config)
        goal = Goal(collocate=config.layout.collocates)
        links = {ranks.link(a, b) for a, b in zip(home, home[1:], strict=False) if a != b}
        if not links:
            return goal
        slowest = max(links, key=lambda link: (link.time_s(1 << 20), link.latency_s))
        return self._weighed(config, replace(goal, link=slowest))

    def _weighed(self, config: Config, goal: Goal) -> Goal:
        """The goal, or the goal without messages if that lowers the time of the busiest device or
        link.

        Recomputation as needed is compared without any recomputation.
        """
        if config.recompute.as_needed:
            config = replace(config, recompute=Recompute.NEVER)
        key = self._costs_key(config, config.placement), config.placement, goal
        if key not in self._goals:
            self._goals[key] = goal
            without = replace(goal, link=Link())
            with suppress(UnfitError):
                counted = self.planner.cut(config, self._free_cuts(config, goal))
                if _may_ignore_messages(counted):
                    other = self.planner.cut(config, self._free_cuts(config, without))
                    if other.busy_s(split=False) < counted.busy_s(split=False):
                        self._goals[key] = without
        return self._goals[key]

    def _free_cuts(self, config: Config, goal: Goal) -> Partition:
        """Partition of about the least load, ignoring memory. Raises UnfitError if there is none.

        Several stages, or pairs of stages, of a device are cut as if each had a device of its own.
        With one stage per device the search is exact at the same cost.
        """
        placement = config.placement
        if placement.num_chunks > 1:
            goal = replace(goal, order=("load",))
            with suppress(UnfitError):  # twice as many devices may leave a skip no legal place
                return Partition(
                    placement, self._best_cuts(config, one_stage_per_device(placement), goal).cuts
                )
        return self._best_cuts(config, placement, goal)

    def _find_partition(
        self, costs_key: CostsKey, placement: Placement, goal: Goal
    ) -> Partition | PartitionError:
        try:
            work, activations, every = costs_key
            costs = tuple(self.costs.chain_at(*work, activations, kinds) for kinds in every)
            return find_partition(costs, placement, goal, explain=False)
        except PartitionError as error:
            return error


def _may_ignore_messages(stages: Stages) -> bool:
    """True if computation bounds the period, well above an even share, and messages are long enough
    for the partition to have avoided some."""
    work_s = stages.work_s(split=False)
    sent_s = busiest_link_s(stages.partition.placement, stages.edges)
    even_s = sum(work_s) / len(work_s)
    return max(work_s) > (1 + NEAR) * even_s and NEAR * max(work_s) < sent_s < max(work_s)


def _is_legal(costs: ChainCosts, partition: Partition, collocate: bool) -> bool:
    """True if collocated skips stay on their devices and each stage lies within one chain."""
    starts = tuple(partition.cuts[stage] for stage in partition.placement.starts)
    travels = collocate and any(crossing.skip for crossing in crossings(costs, partition))
    return starts == costs.starts and not travels
