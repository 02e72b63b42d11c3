"""Best partition for each layout of a skip model over devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.layouts import Layout, modes
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.evaluate import Evaluation
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.volume import Volume, relayed, volume


@dataclass(frozen=True)
class BestPartition:
    """Best partition for a layout; times and bytes count skips as that layout moves them."""

    layout: Layout
    partition: Partition
    evaluation: Evaluation
    volume: Volume


def best(layout: Layout, costs: ChainCosts, num_devices: int, goal: Goal) -> BestPartition:
    """Find the best partition for ``layout`` by ``goal``; the layout decides ``goal.collocate``.

    Raises PartitionError.
    """
    goal = replace(goal, collocate=layout.collocates)
    travelling = relayed(costs) if layout.relays else costs
    partition = find_partition(travelling, layout.placement(num_devices), goal)
    moved = volume(travelling, partition)
    boundary = volume(costs, partition).boundary
    moved = replace(moved, boundary=boundary, skip=moved.total - boundary)
    return BestPartition(layout, partition, goal.evaluate(travelling, partition), moved)


def best_of_each(
    costs: ChainCosts, num_devices: int, goal: Goal, num_chunks: int
) -> Mapping[Layout, BestPartition | PartitionError]:
    """Best partition of every layout, or the error that says why there is none.

    ``num_chunks`` is the number of stages per device in layouts with several. A layout that cannot
    collocate skips is also tried with relayed skips.
    """
    outcomes: dict[Layout, BestPartition | PartitionError] = {}
    for known in modes().values():
        layout = known.with_chunks(num_chunks)
        for tried in (layout,) if layout.kind.keeps_skips else (layout.relayed(), layout):
            try:
                outcomes[tried] = best(tried, costs, num_devices, goal)
            except PartitionError as error:
                outcomes[tried] = error
    return outcomes
