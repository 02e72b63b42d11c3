"""Context parallelism in whole runs, of modules and of families: alike in every layout, resumed,
refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.layouts import ROW, WHOLE
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
from tests.integration.runs import BASE, STEPS, TINY, Run, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_families import FAMILIES, flags_of
from tests.ranks import run_ranks


def _run(num_ranks: int, context: int, *flags: str, backbone: str = "tokens") -> Run:
    divided = ["--context-parallel-size", str(context)] if context > 1 else []
    return run(num_ranks, *STEPS, *divided, *flags, backbone=backbone)


def assert_close(got: Run, expected: Run) -> None:
    """Equal up to rounding, and to Adam's first steps of gradients that are rounding alone."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert got.validation == pytest.approx(expected.validation, rel=1e-4)
    for name, weight in expected.weights.items():
        if not name.endswith(("into.bias", "linear_qkv.bias")):  # attention ignores those of keys
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-3, atol=5e-5)


def test_ranks_that_share_tokens_train_as_one_and_in_a_pipeline_bit_for_bit() -> None:
    two = _run(2, 2)
    assert_close(two, _run(1, 1))
    assert_same(_run(4, 2, *pipeline(2)), two)


def test_a_run_goes_on_with_other_ranks_that_share_tokens(tmp_path: Path) -> None:
    two = _run(2, 2, "--save", str(tmp_path / "run"), "--save-interval", "1")
    end = replace(two, losses=two.losses[1:], grad_norms=two.grad_norms[1:])
    begin = ["--load", str(tmp_path / "run"), "--ckpt-step", "1"]
    assert_same(_run(2, 2, *begin), end)
    for num_ranks, context in ((4, 4), (2, 1)):
        assert_close(_run(num_ranks, context, *begin), end)


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
        assert_close(_run(4, 2, *flags), one)
    lora = ["--pulse-adapter", "lora", "--pulse-adapter-target", "into"]
    assert_close(_run(2, 2, *lora), _run(1, 1, *lora))


def test_uneven_shares_train_as_one() -> None:
    """6, 5 and 5 of 16 tokens, between stages too.

    Sums over three ranks depend on a gradient's place in its buffer, which a pipeline changes.
    """
    heads = ["--pulse-option", "heads=3", "--pulse-option", "width=12"]
    one, three, six = (_run(1, 1, *heads), _run(3, 3, *heads), _run(6, 3, *heads, *pipeline(2)))
    assert_close(three, one)
    assert_close(six, three)
    assert (six.losses, six.grad_norms[0]) == (three.losses, three.grad_norms[0])


WITH_TENSORS = [
    *("--pulse-backbone", "dit-tiny", "--pulse-option", "in_channels=1"),
    *("--pulse-option", "out_channels=1", "--tensor-model-parallel-size", "2"),
]
"""A family whose 16 tokens sequence-parallel ranks can divide."""


def test_a_family_that_shares_tokens_trains_as_one_and_in_a_fold_bit_for_bit() -> None:
    two = _run(2, 2, backbone="uvit")
    assert_close(two, alone(*STEPS, backbone="uvit"))
    folded = _run(4, 2, *pipeline(2), backbone="uvit")
    assert folded.executed.placement == "fold"
    assert_same(folded, two)


RINGS = {
    "uvit": ["--pulse-option", "num_heads=3", "--pulse-option", "embed_dim=48"],
    "tokens": ["--pulse-option", "heads=3", "--pulse-option", "width=12"],
}
"""A family and a module, of 3 heads that 2 ranks cannot divide."""


@pytest.mark.parametrize("backbone", RINGS)
def test_rings_train_as_one_and_in_a_pipeline_bit_for_bit(backbone: str) -> None:
    """Attention is recomputed too, and its backward pass split."""
    heads = RINGS[backbone]
    two = _run(2, 2, *heads, backbone=backbone)
    assert_close(two, _run(1, 1, *heads, backbone=backbone))
    split = ["--pulse-placement", "sequential", "--pulse-schedule", "zb-h1"]
    flags = pipeline(2, *split, "--recompute-granularity", "selective")
    assert_same(_run(4, 2, *heads, *flags, backbone=backbone), two)


def test_every_way_to_run_a_pipeline_of_a_family_gives_the_bits_of_none() -> None:
    two = _run(2, 2, backbone="uvit")
    sequential = ["--pulse-placement", "sequential"]
    for num_ranks, flags in (
        (8, pipeline(4)),
        (8, pipeline(4, *sequential)),
        (4, pipeline(2, *sequential)),
        (4, pipeline(2, *sequential, "--pulse-schedule", "zb-h1")),
        (4, pipeline(2, "--recompute-granularity", "full")),
        (4, pipeline(2, "--recompute-granularity", "selective")),
        (4, pipeline(2, "--pulse-offload", "*")),
    ):
        assert_same(_run(num_ranks, 2, *flags, backbone="uvit"), two)


def test_a_family_shares_tokens_beside_tensor_and_sequence_parallelism() -> None:
    one = run(1, *STEPS, *WITH_TENSORS[:-2], backbone="none")
    both = [*STEPS, *WITH_TENSORS, "--context-parallel-size", "2"]
    for more in ([], ["--sequence-parallel"]):
        found = run(4, *both, *more, backbone="none")
        assert found.losses == pytest.approx(one.losses, rel=1e-6)
        assert found.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert found.validation == pytest.approx(one.validation, rel=1e-4)
        piped = run(8, *both, *more, *pipeline(2), backbone="none")
        assert (piped.losses, piped.validation) == (found.losses, found.validation)


def test_a_family_goes_on_with_other_ranks_that_share_tokens(tmp_path: Path) -> None:
    """One, two, four and one again, a step each, of one run of one rank."""
    every = ["--train-iters", "4", "--pulse-ema-decay", "0.9"]
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    whole = _run(1, 1, *every, backbone="uvit")
    losses, norms = list[float](), list[float]()
    for step, (num_ranks, context) in enumerate(((1, 1), (2, 2), (4, 4), (1, 1))):
        begin = ["--load", str(tmp_path)] if step else []
        ends = ["--exit-interval", str(step + 1)] if step < 3 else []
        last = _run(num_ranks, context, *every, *save, *begin, *ends, backbone="uvit")
        losses, norms = [*losses, *last.losses], [*norms, *last.grad_norms]
    assert_close(replace(last, losses=losses, grad_norms=norms), whole)
    for name, average in whole.averages.items():
        torch.testing.assert_close(last.averages[name], average, rtol=1e-3, atol=5e-5)
    first, second, third, _ = (
        FileSystemReader(folder).read_metadata().state_dict_metadata
        for folder in sorted(tmp_path.glob("iter_*"))
    )
    assert first.keys() == second.keys() == third.keys()
    sizes = [{k: v.size for k, v in each.items() if hasattr(v, "size")} for each in (first, third)]
    assert sizes[0] == sizes[1]


def test_replicas_of_a_family_that_share_tokens_train_as_one() -> None:
    one = alone(*STEPS, backbone="uvit")
    assert_close(_run(4, 2, "--use-distributed-optimizer", backbone="uvit"), one)
    lora = ["--pulse-adapter", "lora", "--pulse-adapter-target", "*"]
    adapted = _run(1, 1, *lora, backbone="uvit")
    assert_close(_run(4, 2, *pipeline(2), *lora, backbone="uvit"), adapted)


TRANSFORMERS = [name for name in FAMILIES if not name.startswith("sd") or name == "sd3"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_transformer_trains_as_one_and_in_a_pipeline_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    """On buckets of several sizes; texts are divided too, or whole and attended to."""
    flags = [*flags_of(FAMILIES[name], tmp_path), "--pulse-conditioning", "send"]
    shared = ["--context-parallel-size", "2"]
    two = run(2, *flags, *shared, backbone="none")
    assert_close(two, run(1, *flags, backbone="none"))
    assert_same(run(4, *flags, *shared, *pipeline(2), backbone="none"), two)


def test_a_plan_runs_to_the_bit_as_flags_and_exchanges_what_it_says(tmp_path: Path) -> None:
    """On two pipeline devices of two ranks each."""
    path = tmp_path / "plan.json"
    plan = _plan(path, Config(2, 1, 1, 2, ROW, context=2))
    flags = [*TINY["tokens"], "--pulse-plan", str(path)]
    by_plan = run(4, *flags, *STEPS, backbone="none")
    assert_same(by_plan, _run(4, 2, *pipeline(2)))
    ranks = run_ranks(4, census, [*BASE, *flags])
    calls = Counter[Call]()
    for of_rank in ranks:
        calls += Counter({call: n for call, n in of_rank.items() if call.kind == "all-to-all"})
    assert {call.group for call in calls} == {"context"}
    sent = sum(n * call.num_bytes for call, n in calls.items()) / 2  # a half stays
    assert sent == plan.predicted["context_bytes_per_sample"] * plan.global_batch_size


def test_a_plan_of_rings_runs_to_the_bit_as_flags(tmp_path: Path) -> None:
    """4 heads over 3 ranks."""
    path = tmp_path / "plan.json"
    _plan(path, Config(1, 1, 1, 2, WHOLE, context=3))
    assert main(["check", str(path)]) == 0
    by_plan = run(3, *TINY["tokens"], "--pulse-plan", str(path), *STEPS, backbone="none")
    assert_same(by_plan, _run(3, 3))


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
    by_auto = run(4, *TINY["tokens"], *STEPS, *auto, backbone="none")
    plan = load_checked(tmp_path / "plan.json")
    assert (plan.context, plan.world_size) == (2, 4)
    assert_close(by_auto, _run(1, 1))


def test_a_run_chooses_the_number_of_ranks_too(tmp_path: Path) -> None:
    """The plan has the costs, whatever it chooses."""
    auto = ["--pulse-auto", "--pulse-auto-context", "--save", str(tmp_path)]
    by_auto = run(2, *TINY["tokens"], *STEPS, *auto, backbone="none")
    plan = load_checked(tmp_path / "plan.json")
    assert plan.profile.context is not None and plan.context in (1, 2)
    assert_close(by_auto, _run(1, 1))


REFUSED: dict[str, tuple[int, list[str], str]] = {
    "ranks": (3, [], "x --context-parallel-size 2"),
    "tensor parallelism": (4, ["--tensor-model-parallel-size", "2"], "has no tensor parallelism"),
    "FSDP's groups": (
        4,
        ["--use-torch-fsdp2", "--pulse-fsdp-group", "3"],
        "must divide the 4 data- and context-parallel ranks",
    ),
    "rank order": (2, ["--use-tp-pp-dp-mapping"], "in Megatron"),
    "a layer recomputed on one rank": (2, ["--pulse-sdc-check-interval", "2"], "without those"),
    "a search": (2, ["--pulse-auto", "--pulse-auto-context"], "give one of them"),
    "no search": (2, ["--pulse-auto-context"], "was given without --pulse-auto"),
    "dropout": (
        2,
        ["--pulse-adapter", "lora", "--pulse-adapter-dropout", "0.1"],
        "draws a mask for whole sequences",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, flags, said = REFUSED[what]
    good = [*TINY["tokens"], *BASE, *STEPS, "--context-parallel-size", "2"]
    assert said in "\n".join(refuse(monkeypatch, num_ranks, flags, good))


REFUSED_OF_FAMILIES: dict[str, tuple[int, str, list[str], str]] = {
    "a UNet": (2, "unet", [], "unet-tiny has no token sequence between its layers"),
    "tokens": (
        4,
        "uvit",
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        "--context-parallel-size 2: sequence parallelism over 4 ranks: 18 tokens of embed do not",
    ),
}


@pytest.mark.parametrize("what", REFUSED_OF_FAMILIES)
def test_families_refused_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, backbone, flags, said = REFUSED_OF_FAMILIES[what]
    good = [*TINY[backbone], *BASE, *STEPS, "--context-parallel-size", "2"]
    assert said in "\n".join(refuse(monkeypatch, num_ranks, flags, good))
