"""A small plan with its profile, and traces of runs of it; nothing of them needs torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cache

from megatron_pulse.planner.cluster.cluster import cluster, to_record
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.placement import make_placement
from megatron_pulse.planner.observe.trace import (
    DeviceStep,
    StepTrace,
    TimedOperation,
    TimedWait,
    Trace,
    Traffic,
    merge_step,
)
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import stage_problem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.step.replay import edges_of, lags
from megatron_pulse.profile.profile import (
    LayerTimes,
    Profile,
    ProfiledLayer,
    ProfiledSkip,
    Source,
)
from model_specs import load_backbone

OPTIONS = {"in_channels": 1, "depth": 8, "embed_dim": 32}
MICRO_BATCH, MICROBATCHES, REPLICAS = 2, 4, 2


@cache
def small_profile() -> Profile:
    """Uneven layers of milliseconds, at two sizes."""
    backbone = load_backbone("uvit-tiny", OPTIONS)

    def times(i: int, size: int) -> LayerTimes:
        t = 1e-3 * (1 + 0.1 * (i % 5)) * size
        return LayerTimes(t, 1.2 * t, 0.8 * t, 0.1 * t, 0.0, 0.0, 10_000 * size, 20_000 * size)

    count = len(backbone.layers)
    return Profile(
        backbone.record,
        Source.MEASURED,
        "here",
        10**9,
        "float32",
        False,
        "made up",
        tuple(ProfiledLayer(layer.name, 10_000, 4_000) for layer in backbone.layers),
        {size: tuple(times(i, size) for i in range(count)) for size in (1, 2)},
        tuple(ProfiledSkip(s.name, s.source, s.destination, 4_000) for s in backbone.skips),
    )


@cache
def small_plan(
    kind: str = "fold", split: bool = False, pipeline: int = 2, recompute: bool = False
) -> PlanFile:
    """On ``pipeline`` times two ranks, from ``small_profile``, over a link that is felt."""
    profile, link = small_profile(), Link(2e-4, 2e7)
    costs = profile.at(MICRO_BATCH, recompute)
    chunks = 2 if kind == "fold" and pipeline > 1 else 1
    placement = make_placement(kind, pipeline, chunks)
    partition = find_partition(costs, placement, Goal(collocate=kind == "fold", link=link))
    held = [partition.layers_of_stage(s) for s in range(placement.num_stages)]

    edges = edges_of(costs, partition, lambda a, b: link)
    saved = tuple(map(float, partition.per_stage(costs.saved_bytes)))
    problem = stage_problem(
        costs,
        partition,
        MICROBATCHES,
        lags(edges, placement.num_stages),
        split=split,
        activation=saved,
        cap=tuple(
            pipeline * sum(saved[s] for s in placement.stages_of_device(d)) for d in range(pipeline)
        ),
    )
    found = synthesize(problem, effort=4)
    certificate = found.certificate
    crossing = 2 * sum(costs.boundary_bytes[held[e.destination][0]] for e in edges)
    return PlanFile(
        dict(profile.backbone),
        "float32",
        pipeline,
        REPLICAS,
        1,
        False,
        "tp-dp-pp",
        MICRO_BATCH * MICROBATCHES * REPLICAS,
        MICRO_BATCH,
        recompute,
        False,
        True,
        tuple(tuple(costs.names[i] for i in layers) for layers in held),
        found.schedule,
        problem,
        edges,
        {
            "step_s": certificate.makespan,
            "samples_per_s": 16 / certificate.makespan,
            "pipeline_s": certificate.makespan,
            "exposed_reduction_s": 0.0,
            "optimizer_s": 0.0,
            "bubble": 0.1,
            "pipeline_bytes_per_sample": crossing / MICRO_BATCH,
            "data_bytes_per_sample": 0.0,
            "memory_bytes": [2e9] * pipeline,
        },
        {
            "profile_sha256": hashlib.sha256(repr(profile).encode()).hexdigest(),
            "profile": "measured, here: made up",
            "cluster": {**to_record(cluster("cpu")), "nodes": 1, "devices_per_node": 4},
            "schedule": {
                "makespan": certificate.makespan,
                "lower_bound": certificate.lower_bound,
                "gap": certificate.gap,
                "proved": certificate.proved,
                "solver": certificate.solver,
            },
            "versions": {"megatron-pulse": "0.1.0"},
        },
    )


def steps_of(
    schedule: Schedule, lines: list[Timeline], messages: Sequence[Message] = ()
) -> tuple[StepTrace, ...]:
    """What ranks would have recorded that took exactly these times, and waited for ``messages``."""
    steps = []
    for number, line in enumerate(lines, 3):
        zero = random.Random(number).random()

        def at(seconds: float, zero: float = zero) -> float:
            return seconds + zero

        devices = tuple(
            DeviceStep(
                tuple(TimedOperation(d, op, at(line.start[op]), at(line.end[op])) for op in order),
                tuple(
                    TimedWait(m, at(line.start[m.consumer] - 0.25), at(line.start[m.consumer]))
                    for m in messages
                    if m.destination == d
                ),
                Traffic(d, 1000, 1000, 7),
            )
            for d, order in enumerate(schedule.order)
        )
        steps.append(merge_step(number, devices))
    return tuple(steps)


def trace_of(plan: PlanFile, lines: list[Timeline]) -> Trace:
    """The trace of such a run of ``plan``."""
    return Trace(
        {"device": "none"},
        {"size": plan.world_size, "pipeline": plan.pipeline, "data": plan.data, "tensor": 1},
        "abc",
        plan.backbone,
        plan.schedule.name,
        str(plan.placement.kind),
        plan.schedule.placement.device_of_stage,
        plan.num_microbatches,
        "one machine",
        1e-9,
        steps_of(plan.schedule, lines),
    )
