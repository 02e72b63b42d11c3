"""Where the chain is cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.faults import UserError
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.placement import OPPOSITE, PLACEMENTS, Partition, Placement
from megatron_pulse.planner.partition.closed import closed_cuts, largest_fold
from megatron_pulse.planner.partition.evaluate import Evaluation, MemoryRule, evaluate
from megatron_pulse.planner.partition.fold import optimal_fold
from megatron_pulse.planner.partition.joint import Joint
from megatron_pulse.planner.partition.pair_costs import PairCosts
from megatron_pulse.planner.partition.row import optimal_row
from megatron_pulse.planner.partition.several.many import ManyCuts
from megatron_pulse.planner.partition.several.seek import WORK, Sought, seek


class PartitionError(UserError):
    """No legal partition exists; the message says why and what would be legal."""


MEASURES = ("load", "stage", "bytes")
"""By which partitions are compared."""

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
        """The costs of ``partition`` with this goal's link and memory rule."""
        rule = self.memory(partition.placement) if self.memory is not None else None
        return evaluate(costs, partition, self.link, self.lam, rule)


def find_partition(
    costs: ChainCosts,
    placement: Placement,
    goal: Goal | None = None,
    explain: bool = True,
    work: int = WORK,
) -> Partition:
    """The best cuts of ``costs`` over ``placement``; ``goal`` is the load unless given.

    Optimal with one stage per device and on a fold of one wave. With more stages per device about
    ``work`` partial and moved cuts are looked at (see ``several``): all that could be better where
    devices and layers are few, else the most promising; the same each time, on any machine. Of a
    cascade each chain's cuts are the best beside the other chains' (see ``joint``).

    Raises PartitionError when no cut is legal and fits, or none was found, which it then says; it
    names what would do (searching for that takes longer than for the cut, and is left out without
    ``explain``).
    """
    goal = goal or Goal()
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
    found = _search(costs, placement, goal, work)
    if found.cuts is None:
        none = "no cut is" if found.proved else "among the cuts looked at none is"
        why = _why_not(costs, placement, goal, work, found.proved) if explain else ""
        raise PartitionError(why or f"{none} legal and fits")
    return Partition(placement, found.cuts)


def _search(costs: ChainCosts, placement: Placement, goal: Goal, work: int) -> Sought:
    if len(placement.starts) > 1:
        rule = goal.memory(placement) if goal.memory is not None else None
        joint = Joint(costs, placement, goal.link, goal.lam, rule)
        return Sought(joint.cuts(goal.order, goal.collocate, goal.slack), proved=False)
    folded = placement.kind.mirrored and placement.num_stages > 1
    rule = goal.memory(placement) if goal.memory is not None else None
    closed = closed_cuts(len(costs.names), costs.skips) if folded and costs.skips else None
    if placement.num_chunks > (2 if folded else 1):
        many = ManyCuts(costs, placement, goal.link, goal.lam, rule)
        return seek(many, closed, goal.collocate, goal.order, goal.slack, work)
    pairs = PairCosts(costs, goal.link, goal.lam, rule, placement.num_stages // 2)
    cuts = (
        optimal_fold(pairs, closed if goal.collocate else None, goal.order, goal.slack)
        if folded
        else optimal_row(pairs, placement.num_stages, goal.order, goal.slack)
    )
    return Sought(cuts, proved=True)


def _why_not(costs: ChainCosts, placement: Placement, goal: Goal, work: int, proved: bool) -> str:
    """What keeps every cut from being legal, and the smallest P or memory that would do."""

    def fits(placement: Placement, goal: Goal) -> bool:
        return _search(costs, placement, goal, work).cuts is not None

    free = _search(costs, placement, replace(goal, order=("load",), memory=None), work)
    if free.cuts is None:
        none = "no cut" if free.proved else "none of the cuts looked at"
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
    none = "no legal cut" if proved else "none of the legal cuts looked at"
    text = (
        f"{none} over {placement.num_devices} devices fits into their memory of "
        f"{rule.limit_bytes / 1e9:.3g} GB; with {high / 1e9:.3g} GB there would be one"
    )
    most = len(costs.names) // placement.num_chunks
    for num_devices in range(placement.num_devices + 1, most + 1):
        if fits(placement.over(num_devices), goal):
            return f"{text}, or with P = {num_devices}"
    return f"{text}; no larger P would do"


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
