"""Plans with a schedule for the steps of each of three buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.planner.cluster.cluster import BandwidthScope, ClusterLink, cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.mean_over_shapes import over_shapes
from megatron_pulse.profile.measurement.layer_call import describe_chain
from megatron_pulse.profile.measurement.module_sizes import ModuleSizes
from megatron_pulse.profile.parameters import count_parameters
from megatron_pulse.profile.profile import Profile, Source
from model_specs import load_backbone

BUCKETS = "4x8,8x4,8x8"
UNET: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1,
    "transformer_depth": [0, 0], "mid_transformer_depth": 0, "buckets": BUCKETS,
}  # fmt: skip
BATCH = 8
OVERHEAD = 0.8
"""Constant part of a layer's time, beside that of a sample of 8x8, in milliseconds."""


def bucket_chain(shares: Sequence[float] = ()) -> Backbone:
    """A small U-Net whose samples have three shapes."""
    return replace(load_backbone("unet-tiny", UNET), shares=tuple(shares))


@cache
def bucket_profile(shares: tuple[float, ...]) -> Profile:
    """Costs of ``bucket_chain`` at 1 and 8 samples: a constant time, and one by pixels."""
    prepare_profiling()
    backbone = bucket_chain(shares)
    return over_shapes(backbone, partial(_profile, count_parameters(backbone)))


def _profile(parameters: Sequence[int], one: Backbone) -> Profile:
    counts = [ModuleSizes(count) for count in parameters]
    layers, skips, conditioning = describe_chain(one, counts, "float32")
    pixels = prod(one.input_spec.shape) / 64

    def times(size: int) -> tuple[LayerTimes, ...]:
        t, num_bytes = 1e-3 * (OVERHEAD + size * pixels), round(1e6 * size * pixels)
        return (LayerTimes(t, t, t, 0.0, 0.0, 0.0, num_bytes, 2 * num_bytes),) * len(layers)

    return Profile(
        one.record, Source.ANALYTIC, "test", 10**9, "float32", False, "made up", layers,
        {size: times(size) for size in (1, 8)}, skips, conditioning,
    )  # fmt: skip


def bucket_evaluator(shares: Sequence[float], ranks: int) -> Evaluator:
    """Evaluator of ``bucket_profile`` on one node of ``ranks``."""
    link = ClusterLink("loopback", 0.1, 5.0, BandwidthScope.DEVICE)
    machine = replace(cluster("cpu"), devices_per_node=ranks, intra_node=link)
    profile = bucket_profile(tuple(shares))
    return Evaluator(profile, machine, BATCH, state=ParameterState(ema=True))


def bucket_plan(
    sizes: Sequence[int], pipeline: int = 2, data: int = 1, shares: Sequence[float] = (2, 1, 1)
) -> PlanFile:
    """Plan of microbatches of ``sizes``, one for each bucket, on ``pipeline`` x ``data`` ranks.

    Replicas have the distributed optimizer.
    """
    evaluator = bucket_evaluator(shares, pipeline * data)
    layout = WHOLE if pipeline == 1 else FOLD_EXACT
    config = Config(pipeline, data, 1, 2, layout, distributed_optimizer=data > 1)
    whole = whole_step(evaluator, config)
    shapes = []
    for k, (size, shape) in enumerate(zip(sizes, evaluator.profile.shapes, strict=True)):
        own = evaluator.on(evaluator.cluster, profile=evaluator.profile.at_shape(k))
        outcome = whole_step(own, replace(config, micro_batch_size=size), whole)
        shapes.append(ShapeOutcome(shape.name, shape.share, outcome, own))
    return plan_of(whole.with_shapes(tuple(shapes)), evaluator)


def whole_step(evaluator: Evaluator, config: Config, beside: Outcome | None = None) -> Outcome:
    """Whole step of ``config``, by the cuts of ``beside``."""
    count = config.num_microbatches(BATCH)
    stages = evaluator.feasible.best(config)
    if beside is not None:
        of = beside.stages
        stages = evaluator.stages.build(config, of.partition, of.activations)
    found = synthesize(evaluator.problem(config, count, stages), effort=2)
    return evaluator.evaluate(config, found, stages=stages)
