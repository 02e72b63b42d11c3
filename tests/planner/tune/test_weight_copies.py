"""Weight offload in the tuner: bytes and seconds by hand, plans, and the required host link."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import recomputed
from megatron_pulse.planner.tune.report.oom_advice import oom_advice
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.planner.tune.weight_copies import with_weight_copies
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.weight_offload import offload_weights
from tests.planner.tune.problems import cluster, profile
from tests.plans import shown

CONFIG = Config(2, 2, 1, 1, LAYOUTS["fold exact"], recompute=Recompute.ALWAYS)
FROZEN = 10_000_000
GBS = 10.0


def frozen_profile(frozen: int = FROZEN) -> Profile:
    """Layers with frozen weights of 20 MB, which take 2 ms over the link, and few trained."""
    made = profile(random.Random(2), 12, 5)
    layers = tuple(
        replace(la, parameters=frozen + 1000, frozen_parameters=frozen, sharded_parameters=0)
        for la in made.layers
    )
    return replace(made, layers=layers)


def machine(**changes: object) -> Cluster:
    return replace(cluster(1, 4, 16.0, host_gbs=GBS), **changes)  # type: ignore[arg-type]


def evaluator(patterns: tuple[str, ...] = ("*",)) -> Evaluator:
    return Evaluator(offload_weights(frozen_profile(), patterns), machine(), 8)


def test_its_time_and_bytes_by_hand() -> None:
    plain = frozen_profile()
    given = offload_weights(plain, ["*"])
    run = with_weight_copies(given, machine())
    each_s = 2 * FROZEN / (GBS * 1e9)
    for size, rows in plain.times.items():
        for before, after in zip(rows, run.times[size], strict=True):
            assert after.forward_s == pytest.approx(max(before.forward_s, each_s), rel=0.01)
            assert after.input_grad_s == pytest.approx(max(before.input_grad_s, each_s), rel=0.01)
            assert after.weight_grad_s == before.weight_grad_s
            assert after.peak_bytes - before.peak_bytes == 2 * 2 * FROZEN
    assert all(layer.parameters == 1000 and not layer.frozen_parameters for layer in run.layers)
    assert with_weight_copies(plain, machine(host=None)) is plain
    there, here = evaluator().evaluate(CONFIG), evaluator(()).evaluate(CONFIG)
    for d, (less, more) in enumerate(zip(there.memory_bytes, here.memory_bytes, strict=True)):
        held = sum(
            len(here.stages.partition.layers_of_stage(s))
            for s in here.stages.partition.placement.stages_of_device(d)
        )
        assert more - less == pytest.approx(2 * FROZEN * (held - 2), rel=0.01)


def test_quantised_weights_are_copied_as_they_are() -> None:
    plain = frozen_profile()
    packed = replace(
        plain,
        layers=tuple(
            replace(la, quantized_parameters=FROZEN, quantized_bytes=FROZEN) for la in plain.layers
        ),
    )
    run = with_weight_copies(offload_weights(packed, ["*"]), machine())
    (size, rows), *_ = run.times.items()
    least_s = FROZEN / (GBS * 1e9)
    assert all(row.forward_s >= least_s for row in rows)
    assert sum(row.peak_bytes for row in rows) == sum(
        row.peak_bytes + 2 * FROZEN for row in plain.times[size]
    )


def test_fsdp_is_that_of_the_weights_on_the_device() -> None:
    offloaded, plain = evaluator().fsdp_baseline(), evaluator(()).fsdp_baseline()
    assert offloaded is not None and plain is not None
    assert offloaded.step_s == plain.step_s


def test_activations_are_neither_offloaded_nor_selectively_recomputed() -> None:
    of = evaluator()
    assert not of.offloads_activations and evaluator(()).offloads_activations
    assert all(c.recompute is not Recompute.SELECTIVE for c in of.candidates(Choices()))


def test_what_cannot_be_offloaded_is_refused() -> None:
    plain = profile(random.Random(2), 12, 5)
    with pytest.raises(ValueError, match="no layer matches 'blok"):
        offload_weights(plain, ["blok*"])
    with pytest.raises(ValueError, match="have no frozen weights"):
        offload_weights(plain, ["*"])
    with pytest.raises(ClusterError, match="no link to the host, which weight offload requires"):
        Evaluator(offload_weights(frozen_profile(), ["*"]), machine(host=None), 8)


def test_it_is_advised_where_it_is_faster_and_where_nothing_else_fits() -> None:
    heavy = frozen_profile(40 * FROZEN)  # 0.8 GB a layer, three a device
    of = Evaluator(heavy, replace(machine(), memory_gb=2.0), 8)
    choices = Choices(layouts=(LAYOUTS["sequential"],), pipeline=(4,), tensor=(1,))
    said = oom_advice(of, choices, of.candidates(choices), Budget(8.0))
    assert "with frozen weights in host memory (--offload-weights '*'): P=" in said
    assert of.offloading_weights is not None and of.offloading_weights.offloading_weights is None
    assert Evaluator(frozen_profile(), machine(host=None), 8).offloading_weights is None
    assert Evaluator(profile(random.Random(2), 12, 5), machine(), 8).offloading_weights is None


def heavy_evaluator(memory_gb: float) -> Evaluator:
    """Frozen weights of 0.4 GB a layer, copied in 0.04 s, on devices with slow links."""
    link = replace(machine().intra_node, bandwidth_gbs=0.01)
    return Evaluator(frozen_profile(20 * FROZEN), machine(intra_node=link, memory_gb=memory_gb), 32)


@pytest.mark.parametrize("memory_gb", [3.0, 1.0])
def test_it_is_chosen_where_it_is_faster_and_where_nothing_else_fits(memory_gb: float) -> None:
    of = heavy_evaluator(memory_gb)
    found = tune(of, Choices(fsdp=False), 4.0, solver="none")
    best = found.outcomes[0]
    assert best.config.offloads_weights and "weight offload" in str(best.config)
    assert (len(found.outcomes) > 1) == (memory_gb == 3.0)
    assert all(best.throughput > one.throughput for one in found.outcomes[1:])
    plan = plan_of(best, of, found)
    assert plan.profile.offloads_weights and recomputed(plan).predicted == plan.predicted


def test_it_is_not_chosen_where_choices_exclude_it() -> None:
    of = heavy_evaluator(3.0)
    found = tune(of, Choices(pipeline=(4,), fsdp=False), 4.0, solver="none")
    assert not any(one.config.offloads_weights for one in found.outcomes)
    assert found.weight_offload is not None
    assert found.weight_offload.throughput > found.outcomes[0].throughput


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    of = evaluator()
    return plan_of(of.evaluate(CONFIG), of)


def test_a_plan_says_it(plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(layer.offloaded for layer in plan.profile.layers)
    assert recomputed(plan).predicted == plan.predicted
    said = shown(plan, tmp_path, capsys)
    name = plan.layer_names[0]
    assert "weight offload" in said and f"--pulse-offload-weights {name}" in said
    most = max(
        2e-9 * FROZEN * sum(len(plan.stages[s]) for s in plan.placement.stages_of_device(d))
        for d in range(2)
    )
    assert f"frozen weights, at most {most:.3g} GB of host memory per device" in said


def test_copies_hide_no_computation_beyond_profiled_sizes() -> None:
    """Copies take longer than the measured sizes compute; a larger one computes longer still."""
    plain = frozen_profile()
    (size, *_), given = plain.micro_batch_sizes[-1:], offload_weights(plain, ["*"])
    of = Evaluator(given, machine(), 256 * size)
    beyond = replace(CONFIG, micro_batch_size=64 * size)
    whole = Evaluator(plain, machine(), 256 * size).costs.times_at(beyond)
    each_s = 2 * FROZEN / (GBS * 1e9)
    for alone, copied in zip(whole, of.costs.times_at(beyond), strict=True):
        assert copied.forward_s == pytest.approx(max(alone.forward_s, each_s), rel=0.01)
