"""A small plan with its profile, and traces of runs of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import BandwidthScope, ClusterLink, cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile, PlanFileError, save_plan, to_record
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.trace.trace import (
    DeviceStep,
    StepTrace,
    TimedOperation,
    TimedWait,
    Trace,
    Traffic,
    merge_step,
)
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from megatron_pulse.profile.layer_records import LayerTimes, ProfiledLayer, ProfiledSkip
from megatron_pulse.profile.parameters import count_parameters
from megatron_pulse.profile.profile import Profile, Source
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from model_specs import load_backbone

OPTIONS = {"in_channels": 1, "depth": 8, "embed_dim": 32}
MICRO_BATCH, MICROBATCHES, REPLICAS = 2, 4, 2


@cache
def small_profile() -> Profile:
    """Uneven layers of milliseconds, at two sizes."""
    prepare_megatron()
    backbone = load_backbone("uvit-tiny", OPTIONS)
    element = ELEMENT_BYTES["float32"]

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
        tuple(
            ProfiledLayer(
                layer.name, held, sum(spec.bytes_per_sample(element) for spec in layer.inputs)
            )
            for layer, held in zip(backbone.layers, count_parameters(backbone), strict=True)
        ),
        {size: tuple(times(i, size) for i in range(count)) for size in (1, 2)},
        tuple(
            ProfiledSkip(s.name, s.source, s.destination, s.spec.bytes_per_sample(element))
            for s in backbone.skips
        ),
    )


@cache
def small_plan(
    kind: str = "fold", split: bool = False, pipeline: int = 2, recompute: bool = False
) -> PlanFile:
    """On ``pipeline`` times two ranks, from ``small_profile``, over a link that is felt."""
    link = ClusterLink("loopback", 0.02, 200.0, BandwidthScope.DEVICE)
    machine = replace(cluster("cpu"), devices_per_node=REPLICAS * pipeline, intra_node=link)
    layout = WHOLE if pipeline == 1 else FOLD_EXACT if kind == "fold" else ROW
    config = Config(
        pipeline, REPLICAS, 1, MICRO_BATCH, layout, split, recompute=Recompute(recompute)
    )
    samples = MICRO_BATCH * MICROBATCHES * REPLICAS
    state = ParameterState(ema=True)  # as runs keep them by default
    evaluator = Evaluator(small_profile(), machine, samples, state=state)
    problem = evaluator.problem(config, MICROBATCHES)
    outcome = evaluator.evaluate(config, synthesize(problem, effort=4))
    return plan_of(outcome, evaluator)


def with_other_parameters(plan: PlanFile) -> PlanFile:
    """``plan`` as if its second layer had half the parameters, with all that follows from it."""
    first, second, *rest = plan.profile.layers
    layers = first, replace(second, parameters=second.parameters // 2), *rest
    return recomputed(replace(plan, profile=replace(plan.profile, layers=layers)))


def load_edited(plan: PlanFile, change: Callable[[Any], Any], folder: Path) -> PlanFile:
    """``plan`` as it is read from a file in ``folder`` after a ``change`` of its record."""
    record = json.loads(json.dumps(to_record(plan)))
    change(record)
    (folder / "plan.json").write_text(json.dumps(record))
    return load_checked(folder / "plan.json")


type Edit = tuple[Callable[[Any], Any], str]
"""A change of a plan's record, and what is said against it."""


def assert_refused(plan: PlanFile, edit: Edit, folder: Path) -> None:
    """``plan`` is not read after that ``edit``, for the reason that it names."""
    change, reason = edit
    with pytest.raises(PlanFileError) as refused:
        load_edited(plan, change, folder)
    assert reason in str(refused.value)


def shown(plan: PlanFile, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``pulse show`` says of ``plan``, which is read from a file in ``folder`` as it was."""
    save_plan(plan, folder / "plan.json")
    assert load_checked(folder / "plan.json") == plan
    assert main(["show", str(folder / "plan.json")]) == 0
    return capsys.readouterr().out


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
