"""Plans that compute again what is cheap: made, shown, checked, and better than whole layers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.plan_file.plan_file import (
    PlanFile,
)
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.search import search
from tests.planner.tune.problems import cluster, profile
from tests.plans import Edit, assert_refused, shown

CONFIG = Config(4, 1, 1, 1, LAYOUTS["sequential"], max_in_flight=True, recompute=Recompute.NEEDED)


FEW = Choices(
    pipeline=(4,),
    tensor=(1,),
    micro_batch_size=(1,),
    layouts=(LAYOUTS["sequential"], LAYOUTS["interleaved"]),
)


def evaluator(dear: tuple[float, float] | None = (0.5, 0.6), memory_gb: float = 2.5) -> Evaluator:
    """Four stages in a row with room for about half of what they would hold."""
    chain = profile(random.Random(5), 24, 0, parameters=1_000_000, saved_mb=150.0, dear=dear)
    return Evaluator(chain, cluster(1, 4, memory_gb), 12)


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    of = evaluator()
    return plan_of(of.evaluate(CONFIG), of)


def named(plan: PlanFile) -> list[str]:
    return list(plan.activations.by_name(plan.layer_names))


def test_a_plan_says_of_what_layers(
    plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 < len(plan.activations.selective) < 24
    said = shown(plan, tmp_path, capsys)
    assert "activations: selective " in said
    assert f"--pulse-recompute-selective {named(plan)[0]}" in said
    assert max(plan.predicted["memory_bytes"]) <= evaluator().cluster.usable_bytes


def test_it_costs_less_than_whole_layers() -> None:
    with_part, whole = evaluator().evaluate(CONFIG), evaluator(None).evaluate(CONFIG)
    assert with_part.stages.activations.selective and not whole.stages.activations.selective
    assert whole.stages.activations.recompute
    assert with_part.step_s < 0.97 * whole.step_s
    for of in (evaluator(), evaluator(None)):
        found = search(of, of.candidates(FEW))
        assert max(found.outcomes[0].memory_bytes) <= of.cluster.usable_bytes
        assert bool(found.outcomes[0].stages.activations.selective) <= (
            of.profile.times[1][0].selective_s > 0
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_search_minds_what_weight_gradients_wait_with(seed: int) -> None:
    """The weight-gradient queue may hold more than the activations before."""
    rng = random.Random(seed)
    chain = profile(rng, 16, 0, parameters=1_000_000, saved_mb=150.0, dear=(0.2, 0.6))
    of = Evaluator(chain, cluster(1, 4, rng.uniform(1.0, 2.5)), 24)
    found = search(of, of.candidates(replace(FEW, split=(True,))))
    for outcome in found.outcomes:
        assert max(outcome.memory_bytes) <= of.cluster.usable_bytes
        assert not faults_for(outcome.problem, outcome.synthesis.schedule)


def test_what_is_against_it_may_do_the_same() -> None:
    """FSDP2 with equal memory per device."""
    least = [of.fsdp_baseline() for of in (evaluator(memory_gb=3.5), evaluator(None, 3.5))]
    with_part, whole = (found.step_s for found in least if found is not None)
    assert least[0] is not None and least[0].fitted.activations.selective
    assert with_part < whole


EDITS: dict[str, Edit] = {
    "a layer less": (lambda r: r["activations"].popitem(), "times.backward."),
    "none": (lambda r: r.update(activations={}), "times.backward."),
    "an unknown layer": (
        lambda r: r["activations"].update(other="selective"),
        "activations: no stage has a layer 'other'",
    ),
    "cheaper": (
        lambda r: [layer.update(selective_s=0.0) for layer in r["profile"]["times"]["1"]],
        "times.backward.",
    ),
    "smaller": (
        lambda r: [layer.update(selective_bytes=1) for layer in r["profile"]["times"]["1"]],
        "times.saved_bytes.",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_refused(edit: str, plan: PlanFile, tmp_path: Path) -> None:
    assert_refused(plan, EDITS[edit], tmp_path)


def test_nothing_is_computed_again_where_that_is_asked() -> None:
    of = evaluator()
    never = of.evaluate(replace(CONFIG, recompute=Recompute.NEVER, max_in_flight=False))
    always = of.evaluate(replace(CONFIG, recompute=Recompute.ALWAYS))
    assert not never.stages.activations.recomputes and not always.stages.activations.selective
