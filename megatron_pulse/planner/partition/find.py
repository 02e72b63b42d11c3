"""Where the chain is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.faults import UserError
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.crossing import SkipEnds
from megatron_pulse.planner.layout.placement import PLACEMENTS, Partition, Placement
from megatron_pulse.planner.partition.evaluate import Evaluation, MemoryRule, evaluate
from megatron_pulse.planner.partition.fold import optimal_fold
from megatron_pulse.planner.partition.pair_costs import Bools, Ints, PairCosts
from megatron_pulse.planner.partition.row import optimal_row


class PartitionError(UserError):
    """No legal partition exists; the message says why and what would be legal."""


MemoryRules = Callable[[Placement], MemoryRule]


@dataclass(frozen=True)
class Goal:
    """What makes a partition the best.

    ``order`` are measures, the first counts most: "load" (the largest device's forward, backward
    and communication time), "stage" (the largest stage by equation 1 of the paper, with ``lam``)
    and "bytes" (between devices). With ``collocate`` both ends of every skip must be on one device
    (a fold only). A measure may be larger than its best by the share ``slack`` where a later one
    gains: with 0.05, the fewest bytes among loads within 5 %. ``memory`` gives what a device may
    hold under a placement.
    """

    order: tuple[str, ...] = ("load", "stage", "bytes")
    collocate: bool = False
    link: Link = field(default_factory=Link)
    lam: float = 1.0
    memory: MemoryRules | None = None
    slack: float = 0.0

    def evaluate(self, costs: ChainCosts, partition: Partition) -> Evaluation:
        """The costs of ``partition`` with this goal's link and memory rule."""
        rule = self.memory(partition.placement) if self.memory is not None else None
        return evaluate(costs, partition, self.link, self.lam, rule)


def find_partition(
    costs: ChainCosts, placement: Placement, goal: Goal | None = None, explain: bool = True
) -> Partition:
    """The best cuts of ``costs`` over ``placement``; ``goal`` is the load unless given.

    Optimal with one stage per device and on a fold of one wave. With more stages per device a
    dynamic program would be exponential in them; there mirror pairs of stages (fold) or stages
    (interleaved) are first spread as if each had a device of its own, which keeps skips at home
    where they must be, and single cuts are then moved while that betters the devices.

    Raises PartitionError when no cut is legal or fits, naming what would (searching for that takes
    longer than for the cut, and is left out without ``explain``).
    """
    goal = goal or Goal()
    folded = placement.kind.mirrored and placement.num_stages > 1
    if goal.collocate and not folded and placement.num_stages > 1:
        homes = " or ".join(kind.name for kind in PLACEMENTS.values() if kind.mirrored)
        raise PartitionError(
            f"to keep both ends of every skip on one device takes a {homes}; the placement is "
            f"{placement.kind}: use a {homes}, or let skips travel"
        )
    if len(costs.names) < placement.num_stages:
        raise PartitionError(
            f"{len(costs.names)} layers are too few for {placement.num_stages} stages; "
            f"{_most_devices(costs, placement, goal.collocate)}"
        )
    partition = _search(costs, placement, goal, folded)
    if partition is None:
        why = _why_not(costs, placement, goal, folded) if explain else "no cut is legal and fits"
        raise PartitionError(why)
    return partition


def _search(costs: ChainCosts, placement: Placement, goal: Goal, folded: bool) -> Partition | None:
    several = placement.num_chunks > (2 if folded else 1)
    rule = goal.memory(placement) if goal.memory is not None else None
    closed = closed_cuts(len(costs.names), costs.skips) if goal.collocate else None
    # Memory is a device's; with several stages on each it is looked at when cuts are moved.
    pairs = PairCosts(
        costs, goal.link, goal.lam, None if several else rule, placement.num_stages // 2
    )
    cuts = (
        optimal_fold(pairs, closed, goal.order, goal.slack)
        if folded
        else optimal_row(pairs, placement.num_stages, goal.order, goal.slack)
    )
    if cuts is None:
        return None
    partition = Partition(placement, cuts)
    if several:
        partition = _move_cuts(costs, partition, goal, rule)
        if rule is not None and _excess(goal.evaluate(costs, partition), rule) > 0:
            return None
    return partition


def _why_not(costs: ChainCosts, placement: Placement, goal: Goal, folded: bool) -> str:
    """What keeps every cut from being legal, and the smallest P or memory that would do."""
    free = Goal(("load",), goal.collocate, goal.link, goal.lam)
    if _search(costs, placement, free, folded) is None:
        return (
            f"no cut into {placement.num_stages} stages on {placement.num_devices} devices keeps "
            f"both ends of each of the {len(costs.skips)} skips on one device; "
            f"{_most_devices(costs, placement, True)}. Use fewer devices, or let skips travel"
        )
    assert goal.memory is not None
    rule = goal.memory(placement)
    low, high = rule.limit_bytes, rule.limit_bytes
    while _search(costs, placement, _with_limit(goal, high), folded) is None:
        low, high = high, 2 * high
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        fits = _search(costs, placement, _with_limit(goal, middle), folded) is not None
        low, high = (low, middle) if fits else (middle, high)
    text = (
        f"no legal cut over {placement.num_devices} devices fits into their memory of "
        f"{rule.limit_bytes / 1e9:.3g} GB; with {high / 1e9:.3g} GB there would be one"
    )
    most = len(costs.names) // placement.num_chunks
    for num_devices in range(placement.num_devices + 1, most + 1):
        larger = placement.over(num_devices)
        if _search(costs, larger, goal, folded) is not None:
            return f"{text}, or with P = {num_devices}"
    return f"{text}; no larger P would do"


def _with_limit(goal: Goal, limit_bytes: float) -> Goal:
    rules = goal.memory
    assert rules is not None

    def limited(placement: Placement) -> MemoryRule:
        rule = rules(placement)
        return MemoryRule(limit_bytes, rule.bytes_per_parameter, rule.in_flight)

    return Goal(("load",), goal.collocate, goal.link, goal.lam, limited)


def largest_fold(num_layers: int, skips: Sequence[SkipEnds]) -> int:
    """The largest P whose one-wave fold has a cut with all skips collocated; 0 where none has.

    See README.md beside this: Legal cuts.
    """
    closed = closed_cuts(num_layers, skips)
    # depth[a, b]: the most pairs of stages that nest inside the layers a <= i < b.
    depth: Ints = np.zeros((num_layers + 2, num_layers + 2), dtype=np.int64)
    for width in range(2, num_layers + 1):
        for a in range(num_layers - width + 1):
            b = a + width
            inner = max(depth[a + 1, b], depth[a, b - 1])
            if closed[a, b]:
                inner = max(inner, 1 + depth[a + 1, b - 1])
            depth[a, b] = inner
    return int(depth[0, num_layers])


def closed_cuts(num_layers: int, skips: Sequence[SkipEnds]) -> Bools:
    """``[a, b]``: no skip has exactly one end among the layers a <= i < b."""
    closed: Bools = np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_)
    for skip in skips:
        i, j = skip.source, skip.destination
        closed[: i + 1, i + 1 : j + 1] = False  # a <= i < b <= j: only the source is inside
        closed[i + 1 : j + 1, j + 1 :] = False  # i < a <= j < b: only the destination is
    return closed


def _most_devices(costs: ChainCosts, placement: Placement, collocate: bool) -> str:
    num_layers = len(costs.names)
    if collocate:
        most = largest_fold(num_layers, costs.skips) // (placement.num_chunks // 2)
    else:
        most = num_layers // placement.num_chunks
    return f"largest legal P with {placement.num_chunks} stages per device: {most}"


def _move_cuts(
    costs: ChainCosts, partition: Partition, goal: Goal, rule: MemoryRule | None
) -> Partition:
    """Move single cuts while that betters the measures legally; first of all, what exceeds."""

    def score(candidate: Partition) -> tuple[float, ...]:
        found = goal.evaluate(costs, candidate)
        values = {
            "load": max(found.load_s),
            "stage": max(found.stage_s),
            "bytes": found.boundary_bytes + found.skip_bytes,
        }
        # Rounded, so that noise does not count as progress.
        return tuple(
            float(f"{v:.9e}") for v in (_excess(found, rule), *(values[m] for m in goal.order))
        )

    def is_legal(candidate: Partition) -> bool:
        return not goal.collocate or all(
            candidate.device_of_layer(s.source) == candidate.device_of_layer(s.destination)
            for s in costs.skips
        )

    best, best_score = partition, score(partition)
    improved = True
    while improved:
        improved = False
        for k in range(1, len(best.cuts) - 1):
            for cut in range(best.cuts[k - 1] + 1, best.cuts[k + 1]):
                moved = Partition(best.placement, (*best.cuts[:k], cut, *best.cuts[k + 1 :]))
                if is_legal(moved) and (found := score(moved)) < best_score:
                    best, best_score, improved = moved, found, True
    return best


def _excess(found: Evaluation, rule: MemoryRule | None) -> float:
    """Bytes by which the fullest device exceeds its memory."""
    return max(0.0, max(found.memory_bytes) - rule.limit_bytes) if rule is not None else 0.0
