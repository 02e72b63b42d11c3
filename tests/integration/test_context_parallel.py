"""Context parallelism of modules in whole runs: alike in every layout, resumed, refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.analytic import analyse, analyse_context
from megatron_pulse.profile.roofline import Roofline
from model_specs import allow, load_backbone
from tests.integration.census import Call, census
from tests.integration.runs import BASE, TINY, Run, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.ranks import run_ranks

TWO = ["--global-batch-size", "8", "--train-iters", "2"]


def _run(num_ranks: int, context: int, *flags: str) -> Run:
    divided = ["--context-parallel-size", str(context)] if context > 1 else []
    return run(num_ranks, *TWO, *divided, *flags, backbone="tokens")


def _assert_close(got: Run, expected: Run) -> None:
    """Equal up to rounding, and to Adam's first steps of gradients that are rounding alone."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert got.validation == pytest.approx(expected.validation, rel=1e-4)
    for name, weight in expected.weights.items():
        if not name.endswith("into.bias"):  # no attention depends on that of keys
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-3, atol=5e-5)


def test_ranks_that_share_tokens_train_as_one_and_in_a_pipeline_bit_for_bit() -> None:
    two = _run(2, 2)
    _assert_close(two, _run(1, 1))
    assert_same(_run(4, 2, *pipeline(2)), two)


def test_a_run_goes_on_with_other_ranks_that_share_tokens(tmp_path: Path) -> None:
    two = _run(2, 2, "--save", str(tmp_path / "run"), "--save-interval", "1")
    end = replace(two, losses=two.losses[1:], grad_norms=two.grad_norms[1:])
    begin = ["--load", str(tmp_path / "run"), "--ckpt-step", "1"]
    assert_same(_run(2, 2, *begin), end)
    for num_ranks, context in ((4, 4), (2, 1)):
        _assert_close(_run(num_ranks, context, *begin), end)


def test_every_way_to_run_a_pipeline_gives_the_bits_of_none() -> None:
    two = _run(2, 2)
    split = ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"]
    for num_ranks, flags in (
        (8, pipeline(4)),
        (4, pipeline(2, *split, "--recompute-granularity", "full")),
        (4, pipeline(2, "--recompute-granularity", "selective")),
        (4, pipeline(2, "--pulse-offload", "*")),
    ):
        assert_same(_run(num_ranks, 2, *flags), two)


def test_replicas_that_share_tokens_train_as_one() -> None:
    one = _run(1, 1)
    for flags in ([], ["--use-distributed-optimizer"]):
        _assert_close(_run(4, 2, *flags), one)
    lora = ["--pulse-adapter", "lora", "--pulse-adapter-target", "into"]
    _assert_close(_run(2, 2, *lora), _run(1, 1, *lora))


def test_uneven_shares_train_as_one() -> None:
    """6, 5 and 5 of 16 tokens, between stages too.

    Sums over three ranks depend on a gradient's place in its buffer, which a pipeline changes.
    """
    heads = ["--pulse-option", "heads=3", "--pulse-option", "width=12"]
    one, three, six = (_run(1, 1, *heads), _run(3, 3, *heads), _run(6, 3, *heads, *pipeline(2)))
    _assert_close(three, one)
    _assert_close(six, three)
    assert (six.losses, six.grad_norms[0]) == (three.losses, three.grad_norms[0])


def test_a_plan_runs_to_the_bit_as_flags_and_exchanges_what_it_says(tmp_path: Path) -> None:
    """On two pipeline devices of two ranks each."""
    path = tmp_path / "plan.json"
    plan = _plan(path, Config(2, 1, 1, 2, ROW, context=2))
    flags = [*TINY["tokens"], "--pulse-plan", str(path)]
    by_plan = run(4, *flags, "--train-iters", "2", backbone="none")
    assert_same(by_plan, _run(4, 2, *pipeline(2)))
    ranks = run_ranks(4, census, [*BASE, *flags])
    calls = Counter[Call]()
    for of_rank in ranks:
        calls += Counter({call: n for call, n in of_rank.items() if call.kind == "all-to-all"})
    assert {call.group for call in calls} == {"context"}
    sent = sum(n * call.num_bytes for call, n in calls.items()) / 2  # a half stays
    assert sent == plan.predicted["context_bytes_per_sample"] * plan.global_batch_size


def _plan(path: Path, config: Config) -> PlanFile:
    """Plan of the module for eight samples a step on devices as slow as processors."""
    machine = Cluster(
        "tests",
        1,
        config.pipeline * config.replicas,
        8.0,
        DeviceFigures(0.1, 20.0),
        ClusterLink("loopback", 1.0, 50.0, BandwidthScope.DEVICE),
    )
    assert machine.peaks is not None
    roofline = Roofline(machine.peaks, "float32")
    allow(TINY["tokens"][1])
    backbone = load_backbone(TINY["tokens"][1], {})
    profile = analyse_context(analyse(backbone, [2], roofline), backbone, roofline)
    evaluator = Evaluator(profile, machine, 8, state=ParameterState(ema=True))
    plan = plan_of(evaluator.evaluate(config), evaluator)
    save_plan(plan, path)
    return plan


def test_a_run_chooses_the_rest_beside_a_given_number_of_ranks(tmp_path: Path) -> None:
    """``--pulse-auto`` measures what two ranks that share tokens do."""
    auto = ["--pulse-auto", "--context-parallel-size", "2", "--save", str(tmp_path)]
    by_auto = run(4, *TINY["tokens"], *TWO, *auto, backbone="none")
    plan = load_checked(tmp_path / "plan.json")
    assert (plan.context, plan.world_size) == (2, 4)
    _assert_close(by_auto, _run(1, 1))


REFUSED: dict[str, tuple[int, list[str], str]] = {
    "ranks": (3, [], "x --context-parallel-size 2"),
    "heads": (8, ["--context-parallel-size", "8"], "its 4 heads do not divide over 8 ranks"),
    "tensor parallelism": (4, ["--tensor-model-parallel-size", "2"], "also divides heads"),
    "FSDP": (4, ["--use-torch-fsdp2"], "--use-torch-fsdp2 cannot be used with"),
    "rank order": (2, ["--use-tp-pp-dp-mapping"], "in Megatron"),
    "a layer recomputed on one rank": (2, ["--pulse-sdc-check-interval", "2"], "without those"),
    "dropout": (
        2,
        ["--pulse-adapter", "lora", "--pulse-adapter-dropout", "0.1"],
        "draws a mask for whole sequences",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, flags, said = REFUSED[what]
    good = [*TINY["tokens"], *BASE, *TWO, "--context-parallel-size", "2"]
    assert said in "\n".join(refuse(monkeypatch, num_ranks, flags, good))
