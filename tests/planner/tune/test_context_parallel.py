"""Ranks that share tokens: their costs by hand, their places, and the search over their number."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.all_to_alls import AllToAllTimes
from megatron_pulse.planner.cluster.rank_order import RankOrder
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.plan_file.elastic import plan_for_world
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags
from megatron_pulse.planner.plan_file.plan_file import read_plan, save_plan, to_record
from megatron_pulse.planner.program.simulate import simulate_step
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.context_rank import context_costs, of_context_rank
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.planner.tune.search.search import search
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.profile import Profile, ProfileError
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.search.test_search import simulate_all
from tests.reference import unsealed_record

LAYER = LayerContextCosts(
    RankShare(0.1, 0.9),
    RankShare(0.2, 0.8),
    RankShare(0.5, 0.5),
    2_000_000,
    8_000_000,
    1,
    600_000,
    2,
)


def of_tokens(whole: Profile, layer: LayerContextCosts = LAYER, heads: int = 8) -> Profile:
    """``whole``, whose boundaries and skips ranks divide."""
    skips = tuple(skip.num_bytes for skip in whole.skips)
    return replace(whole, context=ContextCosts((heads,), (layer,) * len(whole.layers), skips))


CHAIN = of_tokens(profile(random.Random(7), 8, 2, megabytes=4.0))


def test_a_rank_takes_its_share_and_the_exchanges() -> None:
    """4 ranks of a node of 8, whose links have 50 GB/s and 5 us."""
    of_rank = of_context_rank(CHAIN, cluster(1, 8), 4)
    calls = [*[2 * 8e6 / 4 / 2] * 2, *[2 * 6e5 / 2] * 2]  # of a microbatch of 2
    exchange_s = sum(5e-6 + num_bytes * 3 / 4 / 50e9 for num_bytes in calls)
    whole, mine = CHAIN.times_at(2)[3], of_rank.times_at(2)[3]
    assert mine.forward_s == pytest.approx(whole.forward_s * (0.1 + 0.9 / 4) + exchange_s)
    assert mine.input_grad_s == pytest.approx(whole.input_grad_s * (0.1 + 0.9 / 4) + exchange_s)
    assert mine.weight_grad_s == pytest.approx(whole.weight_grad_s * (0.1 + 0.9 / 4))
    assert mine.saved_bytes == pytest.approx(whole.saved_bytes * (0.2 + 0.8 / 4), abs=1)
    assert mine.peak_bytes == pytest.approx(whole.peak_bytes * (0.5 + 0.5 / 4), abs=1)
    assert {layer.boundary_bytes for layer in of_rank.layers} == {2_000_000 + 500_000}
    assert {skip.num_bytes for skip in of_rank.skips} == {1_000_000}
    assert [layer.parameters for layer in of_rank.layers] == [
        layer.parameters for layer in CHAIN.layers
    ]
    again = of_rank.at(2, ActivationPolicies(frozenset(range(8))))
    kept = of_rank.at(2, ActivationPolicies())
    more = [a - b for a, b in zip(again.backward_s, kept.backward_s, strict=True)]
    assert more == pytest.approx(kept.forward_s)  # with its exchanges


def test_ranks_whose_heads_do_not_divide_pass_keys_and_values_round() -> None:
    """8 heads over 3 ranks of a node of 6; backward sends gradients too."""
    ringed = replace(LAYER, ring_bytes=3_000_000)
    machine, chain = cluster(1, 6), of_tokens(CHAIN, ringed)
    assert Evaluator(chain, machine, 6).costs.context_degrees() == (1, 2, 3, 6)
    assert Evaluator(CHAIN, machine, 6).costs.context_degrees() == (1, 2)
    part, whole = of_context_rank(chain, machine, 3).times_at(1)[0], chain.times_at(1)[0]
    gathers_s = 2 * (5e-6 + 3e5 * 2 / 3 / 50e9)
    shift_s = 5e-6 + 3e6 / 3 / 50e9
    for name, shifts in (("forward_s", 2), ("input_grad_s", 4)):
        expected = getattr(whole, name) * (0.1 + 0.9 / 3) + gathers_s + shifts * shift_s
        assert getattr(part, name) == pytest.approx(expected)
    evaluator = Evaluator(chain, machine, 6)
    found = evaluator.evaluate(Config(1, 2, 1, 1, WHOLE, recompute=Recompute.ALWAYS, context=3))
    ring, gathered = (2 + 2) * 2 * 3e6, 3 * 2 * 6e5
    assert found.figures()["context_bytes_per_sample"] == pytest.approx(8 * (ring + gathered))
    with pytest.raises(UnfitError, match="combine ring attention with no tensor parallelism"):
        evaluator.refuse(Config(1, 1, 2, 1, WHOLE, context=3))
    with pytest.raises(UnfitError, match="no costs of ring attention"):
        Evaluator(CHAIN, machine, 6).refuse(Config(1, 2, 1, 1, WHOLE, context=3))


def test_measured_all_to_alls_replace_links() -> None:
    """Time of groups of as many ranks, on a line between two measured sizes."""
    measured = AllToAllTimes(4, (10**6, 3 * 10**6), (1e-3, 2e-3))
    machine = replace(cluster(1, 8), all_to_alls=(measured,))
    calls = [1e-3 + 1e-3 * (2e6 - 1e6) / 2e6] * 2 + [1e-3] * 2  # of 2 MB and of 0.6 MB
    exchanged, by_links = (of_context_rank(CHAIN.only(2), machine, k) for k in (4, 2))
    whole, mine = CHAIN.times_at(2)[0], exchanged.times_at(2)[0]
    assert mine.forward_s == pytest.approx(whole.forward_s * (0.1 + 0.9 / 4) + sum(calls))
    assert by_links == of_context_rank(CHAIN.only(2), cluster(1, 8), 2)


def test_inputs_passed_on_are_a_ranks_share_of_the_boundary() -> None:
    """Not of the saved bytes, of which ranks divide less here: recomputation would keep less than
    nothing."""
    times = {
        size: tuple(replace(row, passed_bytes=size * 4_000_000) for row in rows)
        for size, rows in CHAIN.times.items()
    }
    layer = replace(LAYER, saved=RankShare(1.0, 0.0), boundary_bytes=4_000_000)
    part = of_context_rank(of_tokens(replace(CHAIN, times=times), layer), cluster(1, 8), 4)
    assert {row.passed_bytes for row in part.times_at(8)} == {8 * 1_000_000}
    again = part.at(8, ActivationPolicies(frozenset(range(8))))
    assert again.saved_bytes[0] == 8 * 1_000_000 and set(again.saved_bytes[1:]) == {0}


def test_layers_without_a_backward_exchange_forwards_alone() -> None:
    frozen = tuple(
        replace(layer, frozen_parameters=layer.parameters, needs_grad=False)
        for layer in CHAIN.layers
    )
    times = {
        size: tuple(replace(row, input_grad_s=0.0, weight_grad_s=0.0) for row in rows)
        for size, rows in CHAIN.times.items()
    }
    part = replace(CHAIN, layers=frozen, times=times, skips=(), context=None)
    part = of_context_rank(of_tokens(part), cluster(1, 2), 2)
    assert all(row.input_grad_s == 0 < row.forward_s for row in part.times_at(1))


@pytest.mark.parametrize(("pipeline", "data", "tensor", "context"), [(2, 2, 2, 2), (4, 1, 1, 4)])
def test_ranks_have_megatrons_places(pipeline: int, data: int, tensor: int, context: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    theirs = RankGenerator(tensor, 1, data, pipeline, context, order, 0)
    ours = RankOrder(cluster(2, 8), pipeline, data, tensor, False, context)
    groups = theirs.get_ranks("dp-cp")
    for device in range(pipeline):
        assert sorted(ours.of_place(device)) == sorted(
            rank
            for group in theirs.get_ranks("tp-dp-cp")
            if ours.rank(device, 0) in group
            for rank in group
        )
        assert list(ours._replicas(device)[0]) in [sorted(group) for group in groups]
    for group in theirs.get_ranks("cp"):
        assert group == list(range(group[0], group[0] + tensor * context, tensor))
    for group in theirs.get_ranks("pp"):
        assert [rank - group[0] for rank in group] == [
            ours.rank(device, 0) for device in range(pipeline)
        ]


def test_ranks_that_share_tokens_are_no_replicas_and_share_the_optimizer() -> None:
    evaluator = Evaluator(CHAIN, cluster(1, 8), 16)
    four = Config(1, 2, 1, 1, WHOLE, distributed_optimizer=True, context=4)
    replicas = Config(1, 8, 1, 1, WHOLE, distributed_optimizer=True)
    assert (evaluator.costs.num_microbatches(four), four.replicas) == (8, 8)
    assert evaluator.costs.num_microbatches(replicas) == 2
    assert evaluator.costs.per_parameter(four) == evaluator.costs.per_parameter(replicas)
    mine, theirs = (evaluator.evaluate(config) for config in (four, replicas))
    assert mine.optimizer_s == theirs.optimizer_s
    assert mine.data_bytes == theirs.data_bytes
    assert mine.memory_bytes[0] < theirs.memory_bytes[0]


def test_steps_and_exchanged_bytes_by_hand() -> None:
    """One device computes the shares and exchanges, one microbatch after the other."""
    machine = cluster(1, 4)
    evaluator = Evaluator(CHAIN, machine, 8)
    for recompute, passes in ((Recompute.NEVER, 2), (Recompute.ALWAYS, 3)):
        config = Config(1, 1, 1, 2, WHOLE, recompute=recompute, context=4)
        found = evaluator.evaluate(config)
        part = of_context_rank(CHAIN, machine, 4)
        whole_s = sum(
            (passes - 1) * row.forward_s + row.input_grad_s + row.weight_grad_s
            for row in part.times_at(2)
        )
        assert found.pipeline_s == pytest.approx(4 * whole_s)
        figures = found.figures()
        sent = 8 * passes * 3 / 4 * (8e6 + 4 * 6e5)
        assert figures["context_bytes_per_sample"] == pytest.approx(sent)
        calls = [*[2 * 8e6 / 4 / 2] * 2, *[2 * 6e5 / 2] * 2]
        exchange_s = sum(5e-6 + num_bytes * 3 / 4 / 50e9 for num_bytes in calls)
        assert figures["context_s"] == pytest.approx(4 * 8 * passes * exchange_s)
    assert "context_s" not in evaluator.evaluate(Config(1, 4, 1, 2, WHOLE)).figures()


def test_messages_of_a_pipeline_are_a_ranks_share() -> None:
    evaluator = Evaluator(CHAIN, cluster(1, 8), 8)
    config = Config(2, 1, 1, 1, ROW, context=4)
    alone = Config(2, 4, 1, 1, ROW)
    mine, theirs = (evaluator.evaluate(c) for c in (config, alone))
    cuts = mine.stages.partition
    both = [evaluator.evaluate(c, stages=evaluator.cut(c, cuts)) for c in (config, alone)]
    (a, b) = ([edge.seconds - 5e-6 for edge in each.stages.edges] for each in both)
    share = (2e6 + 5e5) / 4e6  # half of a boundary is divided
    assert a[0] == pytest.approx(share * b[0])
    replayed = simulate_step(mine.problem, mine.synthesis.schedule, mine.stages.edges)
    assert replayed.timeline.makespan == pytest.approx(mine.timeline.makespan)
    assert theirs.pipeline_bytes > mine.pipeline_bytes / 4


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_of_all_degrees(seed: int) -> None:
    rng = random.Random(seed)
    layer = replace(LAYER, all_to_all_bytes=rng.choice([10**5, 10**9]))
    chain = of_tokens(
        profile(rng, 8, rng.choice([0, 2]), saved_mb=rng.choice([20.0, 400.0])), layer
    )
    evaluator = Evaluator(chain, cluster(1, 4, memory_gb=rng.choice([3.0, 40.0])), 4)
    choices = Choices(
        layouts=(WHOLE, ROW, FOLD_EXACT),
        tensor=(1,),
        micro_batch_size=(1,),
        split=(False,),
        max_in_flight=(False,),
        recompute=(Recompute.NEVER, Recompute.ALWAYS),
        context=(1, 2, 4),
    )
    candidates = evaluator.candidates(choices)
    assert {config.context for config in candidates} == {1, 2, 4}
    everything = simulate_all(evaluator, candidates)
    found = search(evaluator, candidates, keep=3)
    best = found.outcomes[0]
    assert best.step_s <= everything[0].step_s * (1 + 1e-12)
    assert best.config.context == everything[0].config.context or best.step_s == pytest.approx(
        everything[0].step_s
    )


def test_context_parallelism_is_chosen_where_nothing_else_fits_and_refused_where_it_loses() -> None:
    """A layer saves more than a device holds; many bytes on the links make it lose."""
    large = of_tokens(
        profile(random.Random(1), 6, 0, saved_mb=20_000.0, even=True),
        LayerContextCosts(*[RankShare(0.0, 1.0)] * 3, 2_000_000, 8_000_000, 1),
    )
    alone = Choices(fsdp=False, tensor=(1,))
    found = tune(Evaluator(large, cluster(1, 8), 8), alone, 3.0)
    assert 1 not in {outcome.config.context for outcome in found.outcomes}
    dear = of_tokens(profile(random.Random(1), 6, 0), replace(LAYER, all_to_all_bytes=10**10))
    found = tune(Evaluator(dear, cluster(1, 4), 8), alone, 2.0)
    assert found.outcomes[0].config.context == 1


def test_degrees_that_a_profile_knows() -> None:
    machine = cluster(2, 8)
    assert Evaluator(CHAIN, machine, 8).costs.context_degrees() == (1, 2, 4, 8)
    assert Evaluator(of_tokens(CHAIN, heads=12), machine, 8).costs.context_degrees() == (1, 2, 4)
    unknown = Evaluator(replace(CHAIN, context=None), machine, 8)
    assert unknown.costs.context_degrees() == (1,)
    every = unknown.candidates(Choices())
    assert every == unknown.candidates(Choices(context=(1,)))
    with pytest.raises(ProfileError, match="pulse profile --backbone test chain --context-para"):
        context_costs(unknown.profile)
    both = Config(1, 1, 2, 1, WHOLE, context=4)
    with pytest.raises(UnfitError, match=r"T x K = 2 x 4 does not divide 12 heads") as refused:
        Evaluator(of_tokens(CHAIN, heads=12), machine, 8).refuse(both)
    assert refused.value.reason is Unfit.SHARDS


def test_costs_at_a_size_between_those_profiled_are_those_of_the_plan(tmp_path: Path) -> None:
    """Bytes of a rank are rounded up once, as the plan's profile of this size alone says."""
    odd = of_tokens(profile(random.Random(3), 8, 2, saved_mb=0.123457))
    evaluator = Evaluator(odd, cluster(1, 4), 12)
    for config in (Config(1, 1, 1, 3, WHOLE, context=4), Config(2, 1, 1, 3, ROW, context=2)):
        save_plan(plan_of(evaluator.evaluate(config), evaluator), tmp_path / "plan.json")
        load_checked(tmp_path / "plan.json")


def test_profile_file_with_and_without_the_costs(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save_profile(CHAIN, file)
    assert load_profile(file) == CHAIN
    sliced = replace(CHAIN, sliced={4: CHAIN.times}, sliced_context={4: CHAIN.context})
    save_profile(sliced, file)
    assert load_profile(file) == sliced
    parts = sliced.in_slices(4)
    assert parts.context == CHAIN.context and parts.in_slices(1) == sliced
    assert replace(CHAIN, sliced={4: CHAIN.times}).in_slices(4).context is None
    save_profile(CHAIN, file)
    record = unsealed_record(file)
    for layer in record["context"]["layers"]:
        del layer["ring_bytes"]
    file.write_text(json.dumps(record))
    assert load_profile(file) == CHAIN  # an older one, without rings
    save_profile(replace(CHAIN, context=None), file)
    record = unsealed_record(file)
    assert "context" not in record and "sliced_context" not in record
    record["context"] = {"heads": [0], "layers": [], "skips": [], "conditioning": [1]}
    file.write_text(json.dumps(record))
    with pytest.raises(ProfileError) as refused:
        load_profile(file)
    for said in ("layers has 0 entries, expected 8", "conditioning has 1", "heads is [0]"):
        assert said in str(refused.value)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan of two pipeline devices of four ranks each."""
    evaluator = Evaluator(CHAIN, cluster(1, 8), 8)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    outcome = evaluator.evaluate(Config(2, 1, 1, 2, FOLD_EXACT, split=True, context=4))
    save_plan(plan_of(outcome, evaluator), path)
    return path


def test_plan_file(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_checked(planned)
    assert (plan.context, plan.world_size, plan.num_microbatches) == (4, 8, 4)
    assert "--context-parallel-size 4" in equivalent_flags(plan)
    assert plan_for_world(planned.parent, 8) == planned
    assert main(["show", str(planned)]) == 0
    said = capsys.readouterr().out
    assert "data 1 x tensor 1 x context 4" in said
    assert "by all-to-alls of 4 ranks" in said and "16 gathers a forward" in said
    report = planned.with_suffix(".html")
    assert main(["show", str(planned), "--layers", "-o", str(report)]) == 0
    assert "exchanged" in report.read_text()
    whole = Evaluator(CHAIN, cluster(1, 8), 8)
    one = plan_of(whole.evaluate(Config(2, 4, 1, 2, FOLD_EXACT)), whole)
    assert "context" not in to_record(one)
    assert "context" not in equivalent_flags(one)


EDITS: dict[str, tuple[Any, str]] = {
    "other degree": (lambda plan: plan.update(context=2), "predicted.context_s"),
    "indivisible": (lambda plan: plan.update(context=3), "K = 3 does not divide 8 heads, and"),
    "no costs": (lambda plan: plan["profile"].pop("context"), "no costs of context parallelism"),
    "rank order": (lambda plan: plan.update(rank_order="tp-pp-dp"), "needs rank_order tp-dp-pp"),
    "a ring": (
        lambda plan: plan["profile"]["context"].update(heads=[3]),
        "no costs of ring attention",
    ),
    "bytes": (
        lambda plan: plan["profile"]["context"]["layers"][0].update(all_to_all_bytes=1),
        "recomputed from profile",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_edited_plans_are_refused(what: str, planned: Path, tmp_path: Path) -> None:
    edit, said = EDITS[what]
    record = unsealed_record(planned)
    edit(record)
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(record))
    _, plan, faults = read_plan(file)
    if not faults:
        with pytest.raises(ValueError, match=said.replace(".", r"\.")):
            load_checked(file)
    else:
        assert any(said in fault for fault in faults)
        assert plan is not None
