"""The collectives that planning counts are those that a training step issues."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.layout.routes import embedders_of, trace_routes
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.collectives import (
    CollectiveCall,
    CollectiveKind,
    backward_sums,
    buckets,
    forward_sums,
    recomputed_sums,
)
from megatron_pulse.planner.tune.conditioning import conditioning
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import Roofline, custom_device
from model_specs import load_backbone
from tests.integration.census import Call, census
from tests.integration.runs import BASE, TINY
from tests.integration.test_families import FAMILIES, write_latents
from tests.ranks import run_ranks

MICROBATCH = 2
TENSOR = ["--tensor-model-parallel-size", "2"]


def issued(num_ranks: int, flags: list[str], count: int) -> list[Counter[Call]]:
    """Calls of every rank in a step of ``count`` microbatches on one pipeline."""
    batch = ["--global-batch-size", str(count)]
    return run_ranks(num_ranks, census, [*BASE, *flags, *batch])


def of(calls: Counter[Call], group: str) -> Counter[CollectiveCall]:
    """The calls on one kind of group."""
    return Counter(
        {
            CollectiveCall(CollectiveKind(c.kind), c.num_bytes): n
            for c, n in calls.items()
            if c.group == group
        }
    )


def tensors(backbone: Backbone) -> list[int]:
    """Elements of every parameter, in the chain's order."""
    with torch.device("meta"):
        modules = [layer.build(meta_context()) for layer in backbone.layers]
    return [p.numel() for module in modules for p in module.parameters()]


@pytest.mark.parametrize("divided", [False, True], ids=["plain", "distributed-optimizer"])
def test_replicas_sum_and_gather_what_is_counted(divided: bool) -> None:
    flags = ["--overlap-grad-reduce", *["--use-distributed-optimizer"] * divided]
    backbone = load_backbone("uvit-tiny", {"in_channels": 1, "depth": 6, "embed_dim": 32})
    (size,) = buckets(tensors(backbone), 2, divided)
    kinds = (
        [CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER]
        if divided
        else [CollectiveKind.ALL_REDUCE]
    )
    for calls in issued(2, [*TINY["uvit"], *flags], 8):
        # Beside them the losses of two microbatches are averaged in fp64.
        assert of(calls, "data") == Counter(
            [
                *(CollectiveCall(kind, 4 * size) for kind in kinds),
                CollectiveCall(CollectiveKind.ALL_REDUCE, 16),
            ]
        )


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_buckets_are_megatrons(divided: bool, first: bool) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import (
        _compute_default_per_buffer_param_layout,
    )
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    counts = [33, 5_000_001, 64, 39_999_999, 1, 70_000_000, 4096 * 4096, 30_000_000, 11, 9_999_999]
    parameters = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in counts]
    for replicas in (2, 3, 8, 64):
        limit = max(40_000_000, 1_000_000 * replicas) if first else None
        if divided:
            layout = DistributedOptimizer._compute_per_buffer_param_layout(
                parameters, limit, replicas, DistributedDataParallelConfig()
            )
        else:
            layout = _compute_default_per_buffer_param_layout(parameters, limit)
        theirs = tuple(end - start for start, end in layout.bucket_indices)
        assert buckets(counts, replicas, divided, first) == theirs
        assert (len(theirs) > 1) == first


def expected(
    profile: Profile, count: int, sequence_parallel: bool, recompute: bool = False
) -> Counter[CollectiveCall]:
    """Sums over tensor-parallel ranks in a step of ``count`` microbatches."""
    found: Counter[CollectiveCall] = Counter()
    for layer in profile.layers:
        given = layer.shard_sums, MICROBATCH, sequence_parallel
        again = recomputed_sums(*given) if recompute else ()
        for call in (*forward_sums(*given), *backward_sums(*given), *again):
            found[call] += count
    return found


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "recompute"),
    [
        ("sd", False, False),
        ("uvit", False, True),
        ("flux", False, True),
        ("hunyuan", True, False),
        ("sd3", True, True),
    ],
)
def test_tensor_parallel_ranks_sum_what_is_counted(
    name: str, sequence_parallel: bool, recompute: bool, tmp_path: Path
) -> None:
    family, count = FAMILIES[name], 2
    write_latents(tmp_path / "latents", family)
    options = dict(option.split("=", 1) for option in family.options)
    backbone = load_backbone(family.backbone, options)
    flags = ["--pulse-backbone", family.backbone, "--pulse-data", f"latents:{tmp_path / 'latents'}"]
    for option in family.options:
        flags += ["--pulse-option", option]
    flags += [*TENSOR, *["--sequence-parallel"] * sequence_parallel]
    if recompute:
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    roofline = Roofline(custom_device(1.0, 1.0, 0.0), "float32")
    counted = expected(
        analyse(backbone, [MICROBATCH], roofline), count, sequence_parallel, recompute
    )
    first, second = issued(2, flags, MICROBATCH * count)
    assert first == second
    more = of(first, "tensor") - counted
    assert not counted - of(first, "tensor"), "counted, but not issued"
    # Norms of queries and keys, whose gradients Megatron sums over the ranks once a step, are in no
    # profile; under sequence parallelism neither are all other replicated parameters, nor the
    # tokens that are gathered at the ends of the chain.
    once = [call for call, times in more.items() if call.kind is CollectiveKind.ALL_REDUCE]
    assert len(once) <= 1 and all(more[call] == 1 for call in once)
    gathered = sum(times for call, times in more.items() if call.kind is CollectiveKind.ALL_GATHER)
    assert gathered <= sequence_parallel * count * (3 + 3 * recompute)
    assert not any(call.kind is CollectiveKind.REDUCE_SCATTER for call in more)


@pytest.mark.parametrize("name", ["hunyuan", "sd"])
def test_pipelines_send_and_copy_what_is_counted(name: str, tmp_path: Path) -> None:
    """Boundaries, skips and conditioning to the byte, both ways, and embedders on every device."""
    family, count = FAMILIES[name], 4
    write_latents(tmp_path / "latents", family)
    options = dict(option.split("=", 1) for option in family.options)
    roofline = Roofline(custom_device(0.1, 20.0, 8.0), "float32")
    profile = analyse(load_backbone(family.backbone, options), [MICROBATCH], roofline)
    config = Config(2, 1, 1, MICROBATCH, ROW)
    link = ClusterLink("loopback", 1.0, 50.0, BandwidthScope.DEVICE)
    cluster = Cluster("tests", 1, 2, 8.0, DeviceFigures(0.1, 20.0), link)
    evaluator = Evaluator(profile, cluster, MICROBATCH * count, state=ParameterState(ema=True))
    outcome = evaluator.evaluate(config, synthesize(evaluator.problem(config, count), effort=1))
    save_plan(plan_of(outcome, evaluator), tmp_path / "plan.json")
    flags = ["--pulse-plan", str(tmp_path / "plan.json"), "--pulse-data"]
    ranks = issued(2, [*flags, f"latents:{tmp_path / 'latents'}"], MICROBATCH * count)

    costs, partition = outcome.stages.costs, outcome.stages.partition
    sent, copied = conditioning(profile, partition, costs, MICROBATCH * count)
    assert bool(copied) == family.replicated and (name == "hunyuan" or sent)
    backbone = load_backbone(family.backbone, options)
    routes = trace_routes(backbone, partition, frozenset(costs.names[e.layer] for e in copied))
    for stage in range(2):
        run_there = {e.layer for e in copied if stage in e.stages}
        assert run_there == set(embedders_of(backbone, routes, stage))
    there = [c.num_bytes for c in crossings(costs, partition) if not c.merged]
    back = [*there, *(MICROBATCH * message.gradient_bytes for message in sent)]
    there += [MICROBATCH * message.forward_bytes for message in sent]
    collectives = [Call("broadcast", "pipeline", e.parameter_bytes) for e in copied]
    collectives += [Call("reduce", "pipeline", e.gradient_bytes) for e in copied]
    for calls, out, into in zip(ranks, (there, back), (back, there), strict=True):
        found = Counter({c: n for c, n in calls.items() if c.group == "pipeline"})
        found -= Counter([Call("broadcast", "pipeline", 8 * count)])  # the losses
        assert found == Counter(
            [
                *(Call("send", "pipeline", size) for size in out * count),
                *(Call("receive", "pipeline", size) for size in into * count),
                *collectives,
            ]
        )
