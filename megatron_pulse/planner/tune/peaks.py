"""What each device holds at most in a step, operation by operation.

Caps leave room for the most that any operation works with, beside the most activations. Here each
operation works beside what is held when it runs; it goes through its layers, so that what those
behind it held is gone, or not there yet. A skip between two stages of a device stays in memory from
stage to stage, and so does its gradient on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import SkipCarrier, carried
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import sent_alone
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.tune.stages import Stages
from megatron_pulse.profile.profile import LayerTimes


@dataclass(frozen=True)
class StageWork:
    """What the operations of a stage have in use at most, beyond what is held: a forward when it
    ends, a backward when it begins, whose activations are there, or are computed again within."""

    forward: float
    backward: float
    within: float


def stage_work(
    stages: Stages, times: Sequence[LayerTimes], parts: Sequence[int], stage: int, split: bool
) -> StageWork:
    """That of ``stage``."""
    costs = stages.costs
    forward = backward = within = later = held = again = 0.0
    for i in reversed(stages.partition.layers_of_stage(stage)):
        recomputed = i in stages.recompute
        extra = max(0.0, times[i].peak_bytes - times[i].saved_bytes) / parts[i]
        alone = (times[i].forward_bytes or times[i].peak_bytes) / parts[i]
        forward = max(forward, (alone if recomputed else extra) - later)
        backward = max(backward, extra - held - again)
        within = max(within, (times[i].peak_bytes / parts[i] if recomputed else extra) - held)
        later += costs.saved_bytes[i]
        held += costs.saved_bytes[i] - (_waiting(costs, i) if split else 0.0)
        again += costs.again_bytes[i] if costs.again_bytes else 0.0
    return StageWork(forward, backward, within)


def _waiting(costs: ChainCosts, layer: int) -> float:
    return (costs.waiting_bytes or costs.saved_bytes)[layer]


@dataclass(frozen=True)
class _LocalSkip:
    """A skip between two stages of a device; ``alone`` where its source stage does not keep it."""

    source: int
    destination: int
    num_bytes: int
    alone: bool
    wants: bool


def _local_skips(costs: ChainCosts, partition: Partition) -> list[_LocalSkip]:
    found = []
    for skip in costs.skips:
        source, destination, carrier = carried(skip, partition)
        if carrier is SkipCarrier.LOCAL:
            alone = sent_alone(skip, partition)
            found.append(_LocalSkip(source, destination, skip.num_bytes, alone, skip.wants))
    return found


def most_in_use(
    stages: Stages, times: Sequence[LayerTimes], parts: Sequence[int], schedule: Schedule
) -> tuple[float, ...]:
    """Bytes of each device in ``schedule``, without its state and messages; ``times`` are those of
    its microbatches, and each layer's work is divided into so many ``parts``."""
    split = Kind.WEIGHT_GRAD in schedule.kinds
    count = stages.partition.placement.num_stages
    works = [stage_work(stages, times, parts, stage, split) for stage in range(count)]
    skips = _local_skips(stages.costs, stages.partition)
    kept, waiting = stages.saved_bytes, stages.waiting_bytes
    again = stages.again_bytes or (0.0,) * len(kept)
    apart = schedule.recomputed_apart

    def change(op: Operation) -> tuple[float, float]:
        """What is held more from the operation's begin, and from its end."""
        stage = op.stage
        match op.kind:
            case Kind.FORWARD:
                pushed = sum(s.num_bytes for s in skips if s.alone and s.source == stage)
                popped = sum(s.num_bytes for s in skips if s.alone and s.destination == stage)
                return kept[stage], pushed - popped
            case Kind.RECOMPUTE:
                return again[stage], 0.0
            case Kind.WEIGHT_GRAD:
                return 0.0, -waiting[stage]
            case _:
                gone = kept[stage] + again[stage] * ((stage, op.microbatch) in apart)
                made = sum(s.num_bytes for s in skips if s.wants and s.destination == stage)
                taken = sum(s.num_bytes for s in skips if s.wants and s.source == stage)
                return 0.0, made - taken - gone + (waiting[stage] if split else 0.0)

    def work(op: Operation) -> float:
        if op.kind is Kind.FORWARD:
            return works[op.stage].forward
        if op.kind in (Kind.RECOMPUTE, Kind.WEIGHT_GRAD):
            return 0.0
        own = works[op.stage]
        return own.backward if (op.stage, op.microbatch) in apart else own.within

    peaks = []
    for order in schedule.order:
        held = most = 0.0
        for op in order:
            if op.kind is Kind.FILLER:
                continue
            begins, ends = change(op)
            held += begins
            most = max(most, held + work(op))
            held += ends
        peaks.append(most)
    return tuple(peaks)
