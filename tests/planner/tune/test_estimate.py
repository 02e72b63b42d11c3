"""Estimates and bounds of a config without a schedule."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_pulse.planner.cluster.cluster import SMALL_BYTES, Cluster, ClusterError
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LAYOUTS, ROW, WHOLE, Layout
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.program.simulate import simulate_step
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.estimate import OPTIMIZER_BYTES
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.profile.layer_records import ProfiledConditioning, ShardSums
from tests.planner.tune.problems import cluster, profile, random_evaluator

CHAIN = profile(random.Random(0), 4, 1)
MEASURED = replace(cluster(), device="profile.json")
"""A cluster whose device is a measured profile."""


@pytest.mark.parametrize(
    ("machine", "device", "threads", "gb_per_s"),
    [
        (cluster(), "test", 0, 500),  # what the cluster says comes first
        (replace(cluster(), device="V100-32GB"), "NVIDIA H200", 0, 900),
        (MEASURED, "NVIDIA A100-SXM4-80GB", 0, 2039),
        (MEASURED, "NVIDIA H200", 0, 4800),
        (MEASURED, "CPU (Xeon, 1 thread)", 1, 10),
        (MEASURED, "a CPU of an older profile", 4, 10),
    ],
)
def test_the_optimizer_takes_as_long_as_its_device_needs(
    machine: Cluster, device: str, threads: int, gb_per_s: float
) -> None:
    evaluator = Evaluator(replace(CHAIN, device=device, threads=threads), machine, 8)
    seconds = evaluator.estimator.optimizer_s(Config(1, 4, 1, 1, WHOLE), 1e9)
    assert seconds == pytest.approx(OPTIMIZER_BYTES / gb_per_s)
    halved = Config(1, 4, 1, 1, WHOLE, distributed_optimizer=True)
    assert evaluator.estimator.optimizer_s(halved, 1e9) == pytest.approx(seconds / 4)


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA H100 PCIe"])
def test_a_device_whose_memory_is_not_known_is_refused(device: str) -> None:
    with pytest.raises(ClusterError, match="bandwidth_gbs: Y") as error:
        Evaluator(replace(CHAIN, device=device), MEASURED, 8)
    assert device in str(error.value)
    Evaluator(replace(CHAIN, device=device), cluster(), 8)


def test_a_measured_optimizer_comes_before_its_bytes() -> None:
    layers = tuple(replace(layer, optimizer_s=0.25) for layer in CHAIN.layers)
    evaluator = Evaluator(replace(CHAIN, layers=layers, device="NVIDIA L40S"), MEASURED, 8)
    held = sum(layer.parameters for layer in layers)
    config = Config(1, 4, 1, 1, WHOLE)
    assert evaluator.estimator.optimizer_s(config, held) == pytest.approx(0.25 * len(layers))
    divided = replace(config, distributed_optimizer=True)
    assert evaluator.estimator.optimizer_s(divided, held) == pytest.approx(0.25 * len(layers) / 4)


def test_what_the_runtime_adds_lengthens_every_operation() -> None:
    config = Config(2, 1, 1, 1, ROW, split=True)
    machine = cluster(devices_per_node=2)
    plain = Evaluator(CHAIN, machine, 4).problem(config, 4)
    slowed = Evaluator(CHAIN, replace(machine, operation_us=500), 4).problem(config, 4)
    for name in ("forward", "backward", "weight_grad"):
        pairs = zip(getattr(plain, name), getattr(slowed, name), strict=True)
        assert [b - a for a, b in pairs] == pytest.approx([5e-4] * 2)


def test_collectives_have_their_own_efficiency_and_latency() -> None:
    machine = replace(
        cluster(intra_gbs=10.0),
        all_reduce_efficiency=0.5,
        all_gather_efficiency=0.25,
        collective_latency=3.0,
    )
    ranks, latency_s = range(4), 3 * 3 * 5e-6
    assert machine.allreduce_s(4e9, ranks) == pytest.approx(2 * (3 / 5 + latency_s))
    assert machine.reduce_scatter_s(4e9, ranks) == pytest.approx(3 / 5 + latency_s)
    assert machine.all_gather_s(4e9, ranks) == pytest.approx(3 / 2.5 + latency_s)
    sooner = replace(machine, small_collectives=4.0)
    for size, as_large in ((4, 1), (SMALL_BYTES, SMALL_BYTES / 4), (1e9, 1e9 - SMALL_BYTES * 0.75)):
        found = sooner.allreduce_s(size, ranks)
        assert found == pytest.approx(machine.allreduce_s(as_large, ranks))


@pytest.mark.parametrize("recompute", [False, True])
def test_every_stage_that_uses_a_copied_embedder_computes_it(recompute: bool) -> None:
    """Layer 0 for stages 1 to 3 of a fold over two devices: its own stage does without."""
    edge = ProfiledConditioning("text", 0, (2, 4, 5, 7), 10**9, embedder=True)
    chain = profile(random.Random(0), 8, 0)
    config = Config(2, 1, 1, 1, FOLD_EXACT, split=True, recompute=Recompute(recompute))
    cuts = Partition(config.placement, (0, 2, 4, 6, 8))
    plain = Evaluator(chain, cluster(devices_per_node=2), 4)
    copying = Evaluator(replace(chain, conditioning=(edge,)), cluster(devices_per_node=2), 4)
    alone, stages = plain.cut(config, cuts), copying.cut(config, cuts)
    before, after = (e.problem(config, 4, s) for e, s in ((plain, alone), (copying, stages)))
    embedder = chain.times[1][0]
    backward_s = embedder.input_grad_s + embedder.weight_grad_s
    again = embedder.forward_s if recompute else 0.0
    later = 0.0 if recompute else embedder.weight_grad_s
    for name, own, added in (
        ("forward", embedder.forward_s, embedder.forward_s),
        ("backward", backward_s - later + again, backward_s),  # nothing of it is put off
        ("weight_grad", later, 0.0),
    ):
        moved = [b - a for a, b in zip(getattr(before, name), getattr(after, name), strict=True)]
        assert moved == pytest.approx([-own, added, added, added])
    apart = [problem.recompute_s or (0.0,) * 4 for problem in (before, after)]
    moved = [b - a for a, b in zip(*apart, strict=True)]
    assert moved == pytest.approx([-again, 0.0, 0.0, 0.0])  # copies keep their activations
    saved = [b - a for a, b in zip(alone.saved_bytes, stages.saved_bytes, strict=True)]
    read = 10**9 if recompute else 0  # what recomputed layers read is kept
    kept = alone.costs.saved_bytes[0], embedder.saved_bytes
    assert saved == [-kept[0], kept[1] + read, kept[1] + 2 * read, kept[1] + read]
    copies = chain.layers[0].parameters * (2 + 4)  # bfloat16, and gradients in fp32
    assert [b - a for a, b in zip(alone.state_bytes, stages.state_bytes, strict=True)] == [
        copies
    ] * 2
    assert copying.estimator.quick_bound(config) <= copying.bound(config, stages)


def test_tensor_parallel_ranks_divide_a_share_of_the_time_and_all_with_their_sequences() -> None:
    """Amdahl's law, layer by layer."""
    some = {"sharded_parameters": 1_000_000, "shard_sums": ShardSums()}
    parts = {
        share: replace(
            CHAIN, layers=tuple(replace(x, sharded_time=share, **some) for x in CHAIN.layers)
        )
        for share in (0.0, 0.25, 1.0)
    }

    def totals(share: float, tensor: int, sequences: bool = False) -> float:
        found = Evaluator(parts[share], cluster(), 8, sequences).costs.totals(
            Config(1, 1, tensor, 1, WHOLE)
        )
        return found.forward_s + found.backward_s + found.weight_grad_s

    alone = totals(0.25, 1)
    assert totals(0.25, 2) == pytest.approx(alone * (0.75 + 0.25 / 2))
    assert totals(0.25, 4) == pytest.approx(alone * (0.75 + 0.25 / 4))
    assert totals(0.0, 4) == pytest.approx(alone)
    assert totals(1.0, 4) == pytest.approx(alone / 4)
    assert totals(0.25, 4, sequences=True) == pytest.approx(alone / 4)


@pytest.mark.parametrize(("halved", "of_four"), [(0.8, 0.7), (0.5, 0.25), (0.4, 0.2)])
def test_tensor_parallel_ranks_take_what_one_of_two_was_measured_to_take(
    halved: float, of_four: float
) -> None:
    """At each size, whatever the largest says; also less than half, from which ranks divide on."""
    times = {
        size: tuple(replace(x, halved_s=halved * x.whole_s) for x in column)
        for size, column in CHAIN.times.items()
    }
    some = {"sharded_parameters": 1_000_000, "shard_sums": ShardSums()}
    layers = tuple(replace(x, sharded_time=0.9, **some) for x in CHAIN.layers)
    evaluator = Evaluator(replace(CHAIN, times=times, layers=layers), cluster(), 8)

    def work(tensor: int) -> float:
        found = evaluator.costs.totals(Config(1, 1, tensor, 1, WHOLE))
        return found.forward_s + found.backward_s

    assert work(2) == pytest.approx(halved * work(1))
    assert work(4) == pytest.approx(of_four * work(1))


@pytest.mark.parametrize("seed", range(5))
def test_forwards_before_a_share_of_the_steps_lengthen_their_mean(seed: int) -> None:
    share, given = 0.5, dict[str, Any](self_conditioning=0.5)
    if seed == 4:
        share, given = 1.0, dict[str, Any](dpo=True)
    plain, found = random_evaluator(seed)
    of = plain.profile, plain.cluster, plain.global_batch_size, plain.costs.sequence_parallel
    often = Evaluator(*of, **given).on(plain.cluster)
    often.effort = plain.effort
    fitting = 0
    for config in found[:: max(1, len(found) // 12)]:
        try:
            without = plain.evaluate(config)
        except UnfitError:
            continue
        fitting += 1
        outcome = often.evaluate(config)
        schedule = outcome.synthesis.schedule.forward_only()
        forwards = simulate_step(outcome.problem, schedule, outcome.stages.edges).timeline
        if not outcome.extrapolated:
            assert outcome.first_pass_s == pytest.approx(share * forwards.makespan)
        parts = outcome.pipeline_s + outcome.reduce_s + outcome.optimizer_s
        assert outcome.step_s >= parts + outcome.first_pass_s
        assert outcome.step_s >= without.step_s + share * max(forwards.busy)
        assert often.estimator.quick_bound(config) <= outcome.step_s * (1 + 1e-9)
        assert often.estimator.estimate(config) > plain.estimator.estimate(config)
    assert fitting


@pytest.mark.parametrize("saved_mb", [100.0, 0.1])
def test_a_device_holds_what_is_kept_of_its_parameters(saved_mb: float) -> None:
    """Averages and sums of gradients for the whole step; the optimizer's copies of these when no
    activation is there."""
    chain = profile(random.Random(3), 8, 2, megabytes=0.01, saved_mb=saved_mb)
    config = Config(2, 1, 1, 1, ROW)
    outcomes = [
        Evaluator(chain, cluster(1, 2), 4, state=state).evaluate(config)
        for state in (
            ParameterState(),
            ParameterState(ema=True),
            ParameterState(grad_reduce_in_bf16=True),
        )
    ]
    plain, averaged, halved = (outcome.memory_bytes for outcome in outcomes)
    held = outcomes[0].stages.per_device(outcomes[0].stages.trained)
    for device, count in enumerate(held):
        beside = plain[device] - 18 * count
        assert averaged[device] == pytest.approx(22 * count + beside)
        assert (beside > 4 * count) == (saved_mb == 100.0)
        assert halved[device] == pytest.approx(16 * count + max(4 * count, beside))


@pytest.mark.parametrize("seed", [0, 1])
def test_memory_that_fills_is_in_the_estimate(seed: int) -> None:
    """Over slow links a microbatch holds its memory for long: with room for as many as there are
    devices they come seldom, and an estimate says so, as simulations do."""
    evaluator = Evaluator(profile(random.Random(seed), 24, 0), cluster(2, 8, inter_gbs=0.5), 128)
    choices = Choices(pipeline=(8,), tensor=(1,), micro_batch_size=(1,), split=(True,))
    every = [
        c
        for c in configs(16, 8, 128, False, choices)
        if c.layout == ROW and not c.pp_before_dp and c.recompute is Recompute.NEVER
    ]
    least, max_in_flight = (next(c for c in every if c.max_in_flight is a) for a in (False, True))
    cuts = evaluator.balancer.quick_partitions(least)[0]
    estimates, steps = [], []
    for config in (least, max_in_flight):
        stages = evaluator.cut(config, cuts)
        estimates.append(evaluator.estimator.cut_estimate(config, stages))
        steps.append(evaluator.evaluate(config, quick=True, stages=stages).step_s)
    assert steps[0] > 1.05 * steps[1]
    assert estimates[0] > 1.02 * estimates[1]
    assert all(0.85 * s < e < 1.01 * s for e, s in zip(estimates, steps, strict=True))


@pytest.mark.parametrize("layout", [ROW, LAYOUTS["fold soft"]], ids=str)
def test_what_just_fits_while_the_optimizer_works_is_found(layout: Layout) -> None:
    """Sums of gradients in half precision are copied then: 20 bytes a parameter for 16."""
    for seed in range(5):
        rng = random.Random(seed)
        chain = profile(rng, 12, 0, megabytes=0.01, saved_mb=1.0)
        sizes = [2 * rng.randint(1_000_000, 40_000_000) for _ in chain.layers]
        layers = tuple(
            replace(layer, parameters=size, sharded_parameters=size)
            for layer, size in zip(chain.layers, sizes, strict=True)
        )
        chain = replace(chain, layers=layers, dtype="float16")
        config = Config(3, 1, 1, 1, layout)
        stages, before = config.placement.num_stages, [0, *itertools.accumulate(sizes)]
        least = min(
            max(
                sum(before[cuts[s + 1]] - before[cuts[s]] for s in own)
                for own in map(config.placement.stages_of_device, range(3))
            )
            for inner in itertools.combinations(range(1, 12), stages - 1)
            for cuts in [(0, *inner, 12)]
        )
        enough = cluster(1, 3, memory_gb=1.0001 * 20 * least / 1e9)
        held = Evaluator(chain, enough, 8).feasible.best(config)
        assert max(held.stepping) == 20 * least
        less = cluster(1, 3, memory_gb=0.9999 * 20 * least / 1e9)
        with pytest.raises(UnfitError):
            Evaluator(chain, less, 8).feasible.best(config)
