"""What each device holds at most in a step, operation by operation.

Caps leave room for the most that any operation works with, beside the most activations. Here each
operation works beside what is held when it runs; it goes through its layers, so that what those
behind it held is gone, or not there yet. A skip between two stages of a device stays in memory from
stage to stage, and so does its gradient on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron_pulse.planner.layout.crossing import SkipCarrier, carried
from megatron_pulse.planner.partition.memory import sent_alone
from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Schedule
from megatron_pulse.planner.tune.memory.working import Working
from megatron_pulse.planner.tune.stages import Stages
from megatron_pulse.profile.record.times import LayerTimes

type _Of = tuple[Kind, int]
"""An operation of any microbatch: its kind and stage."""


def most_in_use(
    stages: Stages, times: Sequence[LayerTimes], parts: Sequence[int], schedule: Schedule
) -> tuple[float, ...]:
    """Bytes of each device in ``schedule``, without its state and messages; ``times`` are those of
    its microbatches, and each layer's work is divided into so many ``parts``."""
    split, apart = Kind.WEIGHT_GRAD in schedule.kinds, schedule.recomputed_apart
    begins, ends = _changes(stages, split)
    works, apart_works = _works(stages, times, parts, split)
    again = stages.again_bytes or (0.0,) * len(stages.saved_bytes)
    peaks = []
    for order in schedule.order:
        held = most = 0.0
        for op in order:
            of = op.kind, op.stage
            computed = op.kind in BACKWARDS and (op.stage, op.microbatch) in apart
            held += begins.get(of, 0.0)
            most = max(most, held + (apart_works if computed else works).get(of, 0.0))
            held += ends.get(of, 0.0) - (again[op.stage] if computed else 0.0)
        peaks.append(most)
    return tuple(peaks)


def _works(
    stages: Stages, times: Sequence[LayerTimes], parts: Sequence[int], split: bool
) -> tuple[Mapping[_Of, float], Mapping[_Of, float]]:
    """What operations have in use at most (``Works``); and a backward whose activations an R has
    computed again."""
    working = Working(times, parts, stages.costs, stages.relief)
    works, apart, back = dict[_Of, float](), dict[_Of, float](), _back(split)
    for stage, (first, end) in enumerate(pairwise(stages.partition.cuts)):
        own = working.of(first, end, split)
        works[Kind.FORWARD, stage], works[Kind.RECOMPUTE, stage] = own.forward, own.computing
        works[back, stage], apart[back, stage] = own.backward, own.after
    return works, apart


def _changes(stages: Stages, split: bool) -> tuple[Mapping[_Of, float], Mapping[_Of, float]]:
    """What is held more from operations' begins, and from their ends."""
    back, begins, ends = _back(split), dict[_Of, float](), dict[_Of, float]()
    away = stages.offloaded_bytes or (0.0,) * len(stages.saved_bytes)
    for stage, kept in enumerate(stages.saved_bytes):
        begins[Kind.RELOAD, stage], ends[Kind.OFFLOAD, stage] = away[stage], -away[stage]
        begins[Kind.FORWARD, stage] = kept
        ends[Kind.FORWARD, stage], ends[back, stage] = 0.0, -kept
        if stages.again_bytes is not None:
            begins[Kind.RECOMPUTE, stage] = stages.again_bytes[stage]
        if split:
            ends[back, stage] += stages.waiting_bytes[stage]
            ends[Kind.WEIGHT_GRAD, stage] = -stages.waiting_bytes[stage]
    for skip in stages.costs.skips:
        source, destination, carrier = carried(skip, stages.partition)
        if carrier is not SkipCarrier.LOCAL:
            continue
        if sent_alone(skip, stages.partition):  # else its stage keeps it anyway
            ends[Kind.FORWARD, source] += skip.num_bytes
            ends[Kind.FORWARD, destination] -= skip.num_bytes
        if skip.wants:
            ends[back, destination] += skip.num_bytes
            ends[back, source] -= skip.num_bytes
    return begins, ends


def _back(split: bool) -> Kind:
    return Kind.INPUT_GRAD if split else Kind.BACKWARD
