"""Search for the best cuts of a chain into stages, in one layout or in each; default placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import UserError
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import SkipEnds
from megatron_pulse.planner.layout.layouts import Layout, default_layout, modes
from megatron_pulse.planner.layout.placement import (
    OPPOSITE,
    PLACEMENTS,
    SEQUENTIAL,
    Partition,
    Placement,
    PlacementKind,
    fold,
    sequential,
)
from megatron_pulse.planner.partition.cascade_dp import CascadePartitioner
from megatron_pulse.planner.partition.evaluate import Evaluation, MemoryRule, evaluate
from megatron_pulse.planner.partition.fold_dp import optimal_fold
from megatron_pulse.planner.partition.legal_cuts import largest_fold, legal_cut_pairs
from megatron_pulse.planner.partition.linear_dp import optimal_row
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from megatron_pulse.planner.partition.multi_chunk.search import WORK, SearchResult, search_cuts
from megatron_pulse.planner.partition.pair_costs import PairCosts
from megatron_pulse.planner.partition.volume import Volume, relayed, volume


class PartitionError(UserError):
    """No legal partition exists; the message gives the reason and a legal alternative."""


MEASURES = ("load", "stage", "bytes")
"""Measures by which partitions are compared."""

MemoryRules = Callable[[Placement], MemoryRule]


@dataclass(frozen=True)
class Goal:
    """Objective and constraints of a partition.

    ``order`` lists measures, the most important first. "load" is the forward, backward and
    communication time of the busiest device. "stage" is the largest stage by equation 1 of the
    paper, with ``lam``. "bytes" are those between devices. With ``collocate`` both ends of every
    skip must be on one device; only a fold can do so. A measure may exceed its best by the share
    ``slack`` if a later measure gains: 0.05 gives the fewest bytes among loads within 5 %.
    ``memory`` returns the memory rule of a placement.
    """

    order: tuple[str, ...] = MEASURES
    collocate: bool = False
    link: Link = field(default_factory=Link)
    lam: float = 1.0
    memory: MemoryRules | None = None
    slack: float = 0.0

    def __post_init__(self) -> None:
        order = self.order
        if not isinstance(order, tuple) or not order or any(m not in MEASURES for m in order):
            raise ValueError(f"order must be a tuple of {', '.join(MEASURES)}; is {order!r:.60}")

    def evaluate(self, costs: ChainCosts, partition: Partition) -> Evaluation:
        """Evaluate ``partition`` with this goal's link and memory rule."""
        rule = self.memory(partition.placement) if self.memory is not None else None
        return evaluate(costs, partition, self.link, self.lam, rule)


def find_partition(
    costs: ChainCosts | Sequence[ChainCosts],
    placement: Placement,
    goal: Goal | None = None,
    explain: bool = True,
    work: int = WORK,
) -> Partition:
    """Find the best cuts of ``costs`` over ``placement``; the default ``goal`` is the load.

    If devices differ, ``costs`` are those of the whole chain on each device. They have equal bytes
    and parameters.

    The result is optimal with one stage per device and on a fold of one wave. With more stages per
    device the search visits about ``work`` partial and moved cuts (see ``several``). It is
    exhaustive if devices and layers are few, else it follows the most promising cuts; it is
    deterministic on any machine. In a cascade each chain's cuts are the best beside the other
    chains' cuts (see ``joint``).

    Raises PartitionError if no legal cut fits the memory, or if none was found; the message
    distinguishes the two. The message also names an alternative. That search takes longer than the
    partition's own and is left out without ``explain``.
    """
    goal = goal or Goal()
    places, costs = _by_device(costs, placement, goal)
    if places and len(costs.starts) > 1:
        raise PartitionError("a cascade takes devices of one kind: use a part of the cluster")
    if len(costs.starts) != len(placement.starts):
        raise PartitionError(
            f"{len(costs.starts)} chain(s) over {placement.kind}, which has "
            f"{len(placement.starts)}: a cascade takes {OPPOSITE}, and nothing else does"
        )
    folded = placement.kind.keeps_skips
    if goal.collocate and not folded and placement.num_stages > 1:
        homes = " or ".join(kind.name for kind in PLACEMENTS.values() if kind.mirrored)
        raise PartitionError(
            f"to keep both ends of every skip on one device takes a {homes}; the placement is "
            f"{placement.kind}: use a {homes}, or let skips travel"
        )
    each = placement.num_stages // len(placement.starts)
    if len(costs.starts) > 1 and (least := min(map(len, costs.chains))) < each:
        raise PartitionError(
            f"a chain of {least} layers is too short for {each} stages: use fewer devices"
        )
    if len(costs.names) < placement.num_stages:
        raise PartitionError(
            f"{len(costs.names)} layers are too few for {placement.num_stages} stages; "
            f"{_most_devices(costs, placement, goal.collocate)}"
        )
    if places:
        found = _search_unlike(places, placement, goal)
    else:
        found = _search(costs, placement, goal, work)
    if found.cuts is None:
        none = "no cut is" if found.proved else "none of the cuts examined is"
        explain = explain and not places
        why = _why_not(costs, placement, goal, work, found.proved) if explain else ""
        raise PartitionError(why or f"{none} legal and fits")
    return Partition(placement, found.cuts)


def _by_device(
    costs: ChainCosts | Sequence[ChainCosts], placement: Placement, goal: Goal
) -> tuple[tuple[ChainCosts, ...], ChainCosts]:
    """Costs on each device, empty if the devices do not differ, and those on one of them."""
    if isinstance(costs, ChainCosts):
        return (), costs
    limits = goal.memory is not None and goal.memory(placement).limits
    alike = all(each is costs[0] for each in costs) and not limits
    return () if alike else tuple(costs), costs[0]


def one_stage_per_device(placement: Placement) -> Placement:
    """Placement in which every stage, or pair of stages, has a device of its own."""
    num = placement.num_stages
    return fold(num // 2) if placement.kind.mirrored and num > 1 else sequential(num)


def _search_unlike(costs: Sequence[ChainCosts], placement: Placement, goal: Goal) -> SearchResult:
    """Best cuts over unlike devices, one stage or pair of stages at a time."""
    spread = one_stage_per_device(placement)
    parts = spread.num_devices // placement.num_devices
    rule = goal.memory(placement) if goal.memory is not None else None
    known: dict[tuple[int, float], PairCosts] = {}
    devices = []
    for each in range(spread.num_devices):
        device = placement.device_of_stage[spread.stages_of_device(each)[0]]
        limit = np.inf
        own = None
        if rule is not None:
            limit = rule.of_device(device).limit_bytes / parts
            own = replace(rule, limit_bytes=limit, limits=())
        pairs = PairCosts(costs[device], goal.link, goal.lam, own, spread.num_devices)
        devices.append(known.setdefault((id(costs[device]), limit), pairs))
    if spread.kind.mirrored and spread.num_stages > 1:
        legal = goal.collocate and costs[0].skips
        closed = legal_cut_pairs(len(costs[0].names), costs[0].skips) if legal else None
        cuts = optimal_fold(devices, closed, goal.order, goal.slack)
    else:
        cuts = optimal_row(devices, goal.order, goal.slack)
    return SearchResult(cuts, proved=parts == 1)


def _search(costs: ChainCosts, placement: Placement, goal: Goal, work: int) -> SearchResult:
    if len(placement.starts) > 1:
        rule = goal.memory(placement) if goal.memory is not None else None
        joint = CascadePartitioner(costs, placement, goal.link, goal.lam, rule)
        return SearchResult(joint.cuts(goal.order, goal.collocate, goal.slack), proved=False)
    folded = placement.kind.mirrored and placement.num_stages > 1
    rule = goal.memory(placement) if goal.memory is not None else None
    closed = legal_cut_pairs(len(costs.names), costs.skips) if folded and costs.skips else None
    if placement.num_chunks > (2 if folded else 1):
        many = BatchedEvaluator(costs, placement, goal.link, goal.lam, rule)
        return search_cuts(many, closed, goal.collocate, goal.order, goal.slack, work)
    pairs = PairCosts(costs, goal.link, goal.lam, rule, placement.num_stages // 2)
    cuts = (
        optimal_fold(pairs, closed if goal.collocate else None, goal.order, goal.slack)
        if folded
        else optimal_row([pairs] * placement.num_stages, goal.order, goal.slack)
    )
    return SearchResult(cuts, proved=True)


def _why_not(costs: ChainCosts, placement: Placement, goal: Goal, work: int, proved: bool) -> str:
    """Reason why no cut is legal, and the smallest P or memory that would do."""

    def fits(placement: Placement, goal: Goal) -> bool:
        return _search(costs, placement, goal, work).cuts is not None

    free = _search(costs, placement, replace(goal, order=("load",), memory=None), work)
    if free.cuts is None:
        none = "no cut" if free.proved else "none of the cuts examined"
        return (
            f"{none} into {placement.num_stages} stages on {placement.num_devices} devices keeps "
            f"both ends of each of the {len(costs.skips)} skips on one device; "
            f"{_most_devices(costs, placement, True)}. Use fewer devices, or let skips travel "
            "(Goal(collocate=False), --pulse-partition soft)"
        )
    assert goal.memory is not None
    rule = goal.memory(placement)
    low, high = rule.limit_bytes, rule.limit_bytes
    while not fits(placement, _with_limit(goal, high)):
        low, high = high, 2 * high
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        enough = fits(placement, _with_limit(goal, middle))
        low, high = (low, middle) if enough else (middle, high)
    none = "no legal cut" if proved else "none of the legal cuts examined"
    text = (
        f"{none} over {placement.num_devices} devices fits into "
        f"{rule.limit_bytes / 1e9:.3g} GB per device; with {high / 1e9:.3g} GB one would fit"
    )
    most = len(costs.names) // placement.num_chunks
    for num_devices in range(placement.num_devices + 1, most + 1):
        if fits(placement.over(num_devices), goal):
            return f"{text}, or with P = {num_devices}"
    return f"{text}; no larger P fits"


def _with_limit(goal: Goal, limit_bytes: float) -> Goal:
    rules = goal.memory
    assert rules is not None

    def limited(placement: Placement) -> MemoryRule:
        return replace(rules(placement), limit_bytes=limit_bytes)

    return Goal(("load",), goal.collocate, goal.link, goal.lam, limited)


def _most_devices(costs: ChainCosts, placement: Placement, collocate: bool) -> str:
    num_layers = len(costs.names)
    if collocate:
        most = largest_fold(num_layers, costs.skips) // (placement.num_chunks // 2)
    else:
        most = num_layers // placement.num_chunks
    text = f"largest legal P with {placement.num_chunks} stages per device: {most}"
    return text if most else f"{text} (a sequential placement has one stage per device)"


@dataclass(frozen=True)
class DefaultPlacement:
    """A kind of placement, and the reason for it (``why``)."""

    kind: PlacementKind
    why: str


def default_placement(
    num_layers: int, skips: Sequence[SkipEnds], collocate: bool
) -> DefaultPlacement:
    """A fold if there are skips that it can collocate, else sequential.

    With ``collocate`` both ends of every skip must be on one device, which is impossible for some
    skips that cross.
    """
    kind = default_layout(bool(skips)).kind
    if not skips:
        return DefaultPlacement(kind, "no skips: a fold has no benefit")
    count = f"{len(skips)} skip{'s' * (len(skips) > 1)}"
    if not collocate:
        return DefaultPlacement(kind, f"{count}, most of them collocated by a fold")
    if largest_fold(num_layers, skips) < 2:
        return DefaultPlacement(SEQUENTIAL, f"{count}, which no fold can collocate")
    return DefaultPlacement(kind, f"{count}, all collocated")


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
