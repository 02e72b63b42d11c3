"""Peak memory of each device over a schedule, operation by operation.

The caps of a schedule problem leave room for the largest working memory of any operation beside the
most activations. Here the working memory of each operation is added to what is held when that
operation runs. An operation walks through its layers, so later layers' activations are already
freed or not yet saved. A skip between two stages of one device stays in memory from stage to stage.
So does the skip's gradient on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron_pulse.planner.layout.crossing import SkipCarrier, skip_carrier
from megatron_pulse.planner.partition.memory import sent_alone
from megatron_pulse.planner.schedule.operations import BACKWARDS, OpType, Schedule
from megatron_pulse.planner.tune.memory.workspace import Workspace
from megatron_pulse.planner.tune.stages import Stages
from megatron_pulse.profile.layer_records import LayerTimes

type _Of = tuple[OpType, int]
"""An operation of any microbatch: (type, stage)."""


def peak_bytes_in_schedule(
    stages: Stages, times: Sequence[LayerTimes], parts: Sequence[int], schedule: Schedule
) -> tuple[float, ...]:
    """Peak bytes of each device in ``schedule``, without parameter state and messages in transit.

    ``times`` are those of the schedule's microbatch size. The work of layer i is divided into
    ``parts[i]`` parts by tensor parallelism.
    """
    split, apart = OpType.WEIGHT_GRAD in schedule.kinds, schedule.recomputed_apart
    begins, ends = _changes(stages, split)
    works, apart_works = _works(stages, times, parts, split)
    again = stages.recompute_bytes or (0.0,) * len(stages.saved_bytes)
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
    """Working memory of each operation (``Works``), and of backwards that follow a separate R."""
    working = Workspace(times, parts, stages.costs, stages.activations)
    works, apart, back = dict[_Of, float](), dict[_Of, float](), _back(split)
    for stage, (first, end) in enumerate(pairwise(stages.partition.cuts)):
        own = working.of(first, end, split)
        works[OpType.FORWARD, stage], works[OpType.RECOMPUTE, stage] = own.forward, own.computing
        works[back, stage], apart[back, stage] = own.backward, own.after
    return works, apart


def _changes(stages: Stages, split: bool) -> tuple[Mapping[_Of, float], Mapping[_Of, float]]:
    """Bytes allocated when an operation begins, and bytes allocated (or freed, if negative) at its
    end."""
    back, begins, ends = _back(split), dict[_Of, float](), dict[_Of, float]()
    away = stages.offload_bytes or (0.0,) * len(stages.saved_bytes)
    for stage, kept in enumerate(stages.saved_bytes):
        begins[OpType.RELOAD, stage], ends[OpType.OFFLOAD, stage] = away[stage], -away[stage]
        begins[OpType.FORWARD, stage] = kept
        ends[OpType.FORWARD, stage], ends[back, stage] = 0.0, -kept
        if stages.recompute_bytes is not None:
            begins[OpType.RECOMPUTE, stage] = stages.recompute_bytes[stage]
        if split:
            ends[back, stage] += stages.wgrad_bytes[stage]
            ends[OpType.WEIGHT_GRAD, stage] = -stages.wgrad_bytes[stage]
    for skip in stages.costs.skips:
        source, destination, carrier = skip_carrier(skip, stages.partition)
        if carrier is not SkipCarrier.LOCAL:
            continue
        if sent_alone(skip, stages.partition):  # else its stage keeps it anyway
            ends[OpType.FORWARD, source] += skip.num_bytes
            ends[OpType.FORWARD, destination] -= skip.num_bytes
        if skip.needs_grad:
            ends[back, destination] += skip.num_bytes
            ends[back, source] -= skip.num_bytes
    return begins, ends


def _back(split: bool) -> OpType:
    return OpType.INPUT_GRAD if split else OpType.BACKWARD
