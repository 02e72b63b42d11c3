"""All contestants under one memory cap: each at its best of what fits, and what does not, refused.

Pipelines may take half and twice the usual microbatch, compute all activations again, or what is
cheap of them, and be cut with memory in view where the best cut does not fit. What relays runs with
and without recomputation where these are predicted to be near. FSDP2, HSDP and DDP: see
``sharded_best``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import bytes_per_parameter, in_flight
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.config import Recompute
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from tests.benchmarks.contestant import Contestant, Engine, Refused
from tests.benchmarks.contestants import Planner, needed_bytes
from tests.benchmarks.emulation import Emulation, setup_of
from tests.benchmarks.sharded_best import NEAR, DataParallel

TIGHTER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of the cap for which a cut is sought: its rule does not know skips that pass through. Cuts
of several stages on a device take long, and only every other share."""


def pipeline_sizes(emulation: Emulation, samples: int) -> list[int]:
    """Samples of a microbatch that pipelines may take."""
    usual = emulation.micro_batch_size
    sizes = [usual, *([usual // 2] if usual % 2 == 0 else []), 2 * usual]
    return [size for size in sizes if samples % size == 0]


RECOMPUTED = {
    "": Recompute.NEVER,
    ", cheap recomputed": Recompute.SELECTIVE,
    ", recomputed": Recompute.ALWAYS,
}
"""What others' pipelines compute again of all layers: nothing, what is cheap of each, or all."""


def way(size: int, recomputed: int, num_layers: int, part: int = 0) -> str:
    """Of a pipeline of which so many layers are recomputed, and of ``part`` what is cheap."""

    def share(count: int) -> str:
        return "all" if count == num_layers else f"{count} of {num_layers} layers"

    told = [f"b={size}", *[f"{share(recomputed)} recomputed"] * bool(recomputed)]
    return ", ".join([*told, *[f"what is cheap of {share(part)} recomputed"] * bool(part)])


def capped(
    emulation: Emulation,
    link: Link,
    num_devices: int,
    samples: int,
    usable: float,
    solver_s: float,
) -> tuple[list[Contestant], list[Refused]]:
    """Who runs where every device may take ``usable`` bytes, and who does not."""
    offers: dict[str, list[Contestant]] = {}
    for size in pipeline_sizes(emulation, samples):
        usual, num = size == emulation.micro_batch_size, len(emulation.costs)
        for words, again in RECOMPUTED.items():
            part = range(num if again is Recompute.SELECTIVE else 0)
            every = again is Recompute.ALWAYS
            policies = ActivationPolicies(range(num * every), selective=part)
            variant = emulation.variant(size, policies)
            plan = CappedPlanner(variant, link, num_devices, samples // size, solver_s, usable)
            found = list(plan.theirs())
            if every and setup_of(emulation.name).adapter_of:
                found.append(plan.deepspeed())
            if usual and (again is Recompute.NEVER or (every and _refused(offers, usable))):
                found += plan.ours()
            for one in found:
                own = one.engine is Engine.OURS
                told = replace(
                    one,
                    name=one.name + words * (not own),
                    way=way(size, num * every, num, len(part)),
                    micro_batch_size=size,
                    backbone=None if usual else variant.backbone,
                )
                offers.setdefault(one.name if own else str(one.engine), []).append(told)
    pipelines: list[Contestant] = []
    refused: list[Refused] = []
    for several in offers.values():
        best: dict[str, Contestant] = {}
        for one in several:
            if needed_bytes(one) <= usable:
                best[one.name] = min(best.get(one.name, one), one, key=lambda c: c.predicted_s)
        soonest = min((one.predicted_s for one in best.values()), default=0.0)
        pipelines += [one for one in best.values() if one.predicted_s <= NEAR * soonest]
        wanting = several[0] if best else min(several, key=needed_bytes)
        if (needs := needed_bytes(wanting)) > usable:
            refused.append(Refused(wanting.name, wanting.engine, wanting.way, needs))
    own = [one for one in pipelines if one.engine is Engine.OURS]
    theirs = [one for one in pipelines if one.engine is not Engine.OURS]
    whole, more = DataParallel(emulation, link, num_devices, samples, usable).offers()
    return [*own, *theirs, *whole], [*refused, *more]


def _refused(offers: dict[str, list[Contestant]], usable: float) -> bool:
    """Whether any of ours does not fit."""
    own = (c for several in offers.values() for c in several if c.engine is Engine.OURS)
    return any(needed_bytes(one) > usable for one in own)


class CappedPlanner(Planner):
    """Cuts and schedules for devices that may take ``usable`` bytes."""

    def __init__(
        self,
        emulation: Emulation,
        link: Link,
        num_devices: int,
        count: int,
        solver_s: float,
        usable: float,
    ) -> None:
        super().__init__(emulation, link, num_devices, count, solver_s)
        self.usable = usable

    def cut(
        self, costs: ChainCosts, placement: Placement, collocate: bool = False
    ) -> Partition | None:
        """The best cut, or where it takes too much the best that the memory rule lets through."""
        best = super().cut(costs, placement, collocate)
        if best is None or self._fits(best, costs):
            return best
        room = self.usable - max(self.working(best))
        for share in TIGHTER[:: placement.num_chunks]:
            dtype = self.emulation.profile.dtype
            each = bytes_per_parameter(dtype)
            limits = share * room, each, in_flight(placement, self.count)
            rule = MemoryRule(*limits, frozen_share=ELEMENT_BYTES[dtype] / each)
            goal = Goal(collocate=collocate, link=self.link, memory=lambda _, rule=rule: rule)
            try:
                found = find_partition(costs, placement, goal, explain=False)
            except PartitionError:
                continue
            if self._fits(found, costs):
                return found
        return best

    def _fits(self, partition: Partition, costs: ChainCosts) -> bool:
        placement = partition.placement
        saved = self.saved(partition, passing=costs is self.relayed)
        flying = in_flight(placement, self.count)
        others = map(sum, zip(self.state(partition), self.working(partition), strict=True))
        return all(
            other + sum(flying[s] * saved[s] for s in placement.stages_of_device(d)) <= self.usable
            for d, other in enumerate(others)
        )

    def problem(self, costs: ChainCosts, partition: Partition, split: bool) -> ScheduleProblem:
        """As ever, but with no more activations than there is room for, and room for one."""
        problem = super().problem(costs, partition, split)
        saved, placement = self.saved(partition, passing=False), partition.placement
        assert problem.cap is not None
        room: list[float] = []
        used = zip(self.state(partition), self.working(partition), problem.cap, strict=True)
        for d, (state, working, most) in enumerate(used):
            least = sum(saved[s] for s in placement.stages_of_device(d))
            room.append(max(least, min(most, self.usable - state - working)))
        return replace(problem, cap=tuple(room))
