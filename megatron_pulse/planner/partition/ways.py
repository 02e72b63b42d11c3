"""The ways to run a skip model over devices, each with the partition that is best for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition, PlacementKind, make_placement
from megatron_pulse.planner.partition.evaluate import Evaluation
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.volume import Volume, relayed, volume


class Way(StrEnum):
    """How stages are laid over devices and how skips between them travel; see ``volume``."""

    RELAY = "relay"
    DIRECT = "direct"
    INTERLEAVED_RELAY = "interleaved relay"
    INTERLEAVED_DIRECT = "interleaved direct"
    FOLD_EXACT = "fold exact"
    FOLD_SOFT = "fold soft"

    @property
    def placement_kind(self) -> PlacementKind:
        """How stages are laid over devices."""
        if self in (Way.FOLD_EXACT, Way.FOLD_SOFT):
            return PlacementKind.FOLD
        if self in (Way.INTERLEAVED_RELAY, Way.INTERLEAVED_DIRECT):
            return PlacementKind.INTERLEAVED
        return PlacementKind.SEQUENTIAL

    @property
    def relays(self) -> bool:
        """Whether skips go through every stage between their ends."""
        return self in (Way.RELAY, Way.INTERLEAVED_RELAY)


@dataclass(frozen=True)
class Outcome:
    """The best partition for a way of running; times and bytes as that way moves skips."""

    way: Way
    partition: Partition
    evaluation: Evaluation
    volume: Volume


def best(way: Way, costs: ChainCosts, num_devices: int, goal: Goal, num_chunks: int = 2) -> Outcome:
    """The partition for ``way`` that is best by ``goal``, whose ``collocate`` the way decides.

    ``num_chunks`` are the stages on each device where there are several. Raises PartitionError.
    """
    placement = make_placement(way.placement_kind, num_devices, num_chunks)
    goal = replace(goal, collocate=way is Way.FOLD_EXACT)
    travelling = relayed(costs) if way.relays else costs
    partition = find_partition(travelling, placement, goal)
    moved = volume(travelling, partition)
    boundary = volume(costs, partition).boundary
    moved = replace(moved, boundary=boundary, skip=moved.total - boundary)
    return Outcome(way, partition, goal.evaluate(travelling, partition), moved)


def compare(
    costs: ChainCosts,
    num_devices: int,
    goal: Goal,
    num_chunks: int = 2,
    ways: Iterable[Way] = tuple(Way),
) -> Mapping[Way, Outcome | PartitionError]:
    """For every way its best partition, or why there is none."""
    outcomes: dict[Way, Outcome | PartitionError] = {}
    for way in ways:
        try:
            outcomes[way] = best(way, costs, num_devices, goal, num_chunks)
        except PartitionError as error:
            outcomes[way] = error
    return outcomes
