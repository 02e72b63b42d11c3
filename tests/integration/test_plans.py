"""Runs that obey a plan file, and plan files that a run cannot obey."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.integration.flags.parse import parse
from megatron_pulse.integration.flags.plan_overrides import apply_plan, contradictions
from megatron_pulse.integration.flags.pulse_options import pulse_options
from megatron_pulse.integration.planning.auto_tune import _kept
from megatron_pulse.integration.planning.run_plan import backbone_of_flags
from megatron_pulse.planner.bubble_fill.encoder_table import read_table
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, ROW
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.bubble_fill import fill_plan
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.channels_last import OPTION, format_caution
from megatron_pulse.profile.files import save_profile
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.roofline import Roofline
from model_specs import load_backbone
from tests.integration.runs import (
    BASE,
    STEPS,
    TINY,
    alone,
    assert_equal_to_rounding,
    assert_same,
    run,
    train,
)
from tests.plans import with_other_parameters
from tests.ranks import RanksFailed, run_ranks, said_once
from tests.reference import unsealed_record
from tests.runtime.tiny import FAMILIES

UVIT = {"in_channels": 1, "depth": 6, "embed_dim": 32}
BATCH = 8
LINK = ClusterLink("loopback", 1.0, 50.0, BandwidthScope.DEVICE)
TO_HOST = ClusterLink("pcie", 50.0, 10.0, BandwidthScope.DEVICE)


def make_plan(
    path: Path,
    config: Config,
    name: str = "uvit-tiny",
    options: Mapping[str, Any] = UVIT,
    encoders: Path | None = None,
    share: float = 0.0,
    optimizer_cpu_offload: bool = False,
) -> Path:
    """A plan of a tiny backbone for ``config``, perhaps with encoders in its idle time, or of which
    a ``share`` of the steps condition themselves, or with the optimizer on the host."""
    ranks = config.pipeline * config.data * config.tensor
    cluster = Cluster("tests", 1, ranks, 8.0, DeviceFigures(0.1, 20.0), LINK, host=TO_HOST)
    device = cluster.peaks
    assert device is not None
    backbone = load_backbone(name, dict(options))
    profile = analyse(backbone, [config.micro_batch_size], Roofline(device, "float32"))
    state = ParameterState(ema=True, optimizer_cpu_offload=optimizer_cpu_offload)
    evaluator = Evaluator(profile, cluster, BATCH, self_conditioning=share, state=state)
    if config.recompute is Recompute.HOST:
        evaluator = short_of_memory(evaluator, config)
    problem = evaluator.problem(config, config.num_microbatches(BATCH))
    outcome = evaluator.evaluate(config, synthesize(problem, effort=4))
    plan = plan_of(outcome, evaluator)
    if encoders is not None:
        plan = recomputed(fill_plan(plan, read_table(encoders).components, 0.5).plan)
    save_plan(plan, path)
    return path


def short_of_memory(evaluator: Evaluator, config: Config) -> Evaluator:
    """Cluster of devices with slightly too little memory for what the config would keep."""
    free = evaluator.evaluate(replace(config, recompute=Recompute.NEVER, max_in_flight=False))
    for percent in range(99, 50, -1):
        gb = percent / 100 * max(free.memory_bytes) / 1e9
        short = evaluator.on(replace(evaluator.cluster, memory_gb=gb))
        problem = short.problem(config, config.num_microbatches(BATCH))
        if synthesize(problem, effort=4).schedule.offloaded:
            return short
    raise AssertionError("nothing leaves")


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (Config(2, 1, 1, 2, FOLD_EXACT, split=True), 0.0),
        (Config(2, 1, 1, 2, ROW, split=True, recompute=Recompute.ALWAYS), 0.0),
        (Config(4, 1, 1, 2, ROW, split=True, max_in_flight=True, recompute=Recompute.HOST), 0.0),
        (Config(4, 1, 1, 2, FOLD_SOFT, max_in_flight=True, recompute=Recompute.HOST), 0.0),
        (
            Config(2, 2, 1, 2, FOLD_SOFT, distributed_optimizer=True, pp_before_dp=True),
            1e-6,
        ),
    ],
    ids=[
        "split-fold",
        "recomputed-sequence",
        "on-the-host",
        "fold-on-the-host",
        "replicas-outside",
    ],
)
def test_a_run_obeys_its_plan(tmp_path: Path, config: Config, tolerance: float) -> None:
    plan = make_plan(tmp_path / "plan.json", config)
    ranks = config.pipeline * config.data
    obeyed = run(ranks, "--pulse-plan", str(plan), *STEPS[2:], backbone="none")
    executed = obeyed.executed
    ways = {Recompute.ALWAYS: {"R"}, Recompute.HOST: {"O", "L"}}
    again = ways.get(config.recompute, set[str]())
    assert executed.operations == ({"F", "I", "W"} if config.split else {"F", "B"}) | again
    assert executed.placement == ("sequential" if config.layout == ROW else "fold")
    assert executed.recomputed == (config.recompute is Recompute.ALWAYS)
    if tolerance:
        assert_equal_to_rounding(obeyed, alone(*STEPS), tolerance)
    else:
        assert_same(obeyed, alone(*STEPS))


def test_auto_has_the_memory_format_of_the_plan_that_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its layers, unless an option says another; what shows and checks plans names it."""
    name, sizes = FAMILIES["unet"]
    sizes = {**sizes, "layers_per_block": 1}
    config = Config(1, 1, 1, 2, ROW)
    path = make_plan(tmp_path / "plan.json", config, name, {**sizes, "channels_last": True})
    assert main(["show", str(path)]) == 0 and main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "whole backwards, convolutions channels_last" in said
    assert "in order; convolutions channels_last" in said
    of_run = ["--pulse-backbone", name, "--save", str(tmp_path), "--pulse-auto"]
    of_run += [w for key, value in sizes.items() for w in ("--pulse-option", f"{key}={value}")]
    for flags, laid in (
        ((), "channels_last"),
        (("--pulse-option", "channels_last=false"), "contiguous"),
    ):
        line = parse([*of_run, *flags])
        line.args.world_size = 1
        options = pulse_options(line.args)
        plan = _kept(path, line.args, options)
        assert plan is not None and not list(contradictions(plan, line, options, "--pulse-auto"))
        chain = backbone_of_flags(line.args, apply_plan(plan, line.args, options))
        convolution = next(layer for layer in chain.layers if layer.name == "conv_in").build(
            meta_context("float32")
        )
        formats = {part.channels_last for part in convolution.modules() if hasattr(part, OPTION)}
        assert formats == {laid == "channels_last"}
        caution = format_caution(plan.backbone, chain.record, "the plan")
        assert bool(caution) == (laid == "contiguous")
    assert caution.startswith("the plan has channels_last convolutions, the run contiguous")
    assert "--option channels_last=false" in caution


def test_a_plan_with_costs_of_another_memory_format_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, sizes = FAMILIES["unet"]
    path = make_plan(tmp_path / "plan.json", Config(1, 1, 1, 2, ROW), name, sizes)
    record = unsealed_record(path)
    record["backbone"]["options"]["channels_last"] = True
    path.write_text(json.dumps(record))
    assert main(["check", str(path)]) == 2
    assert (
        "backbone.options.channels_last is True; recomputed from profile it is False"
        in capsys.readouterr().err
    )


def refused(num_ranks: int, *argv: str, backbone: str = "none") -> str:
    with pytest.raises(RanksFailed) as error:
        run(num_ranks, *argv, "--train-iters", "1", backbone=backbone)
    return str(error.value)


def test_what_contradicts_a_plan_is_refused_all_at_once(tmp_path: Path) -> None:
    config = Config(2, 1, 1, 2, FOLD_EXACT)
    plan = str(make_plan(tmp_path / "plan.json", config))
    message = refused(
        1, "--pulse-plan", plan, "--micro-batch-size", "4", "--pulse-schedule", "gpipe",
        "--pulse-backbone", "uvit-s", "--pulse-placement", "interleaved",
        "--pulse-partition", "soft", "--pulse-link-gbs", "1", "--pulse-link-us", "1",
        "--pulse-memory-gb", "1",
    )  # fmt: skip
    assert "is for 2 ranks (pipeline 2 x data 1 x tensor 1), but 1 ranks were started" in message
    assert "--micro-batch-size 4, but --pulse-plan says 2. Leave the flag out" in message
    assert "--pulse-schedule gpipe and --pulse-plan exclude each other" in message
    assert "--pulse-placement interleaved, but --pulse-plan says fold" in message
    for flag in ("partition soft", "link-gbs 1.0", "link-us 1.0", "memory-gb 1.0"):
        assert f"--pulse-{flag} and --pulse-plan exclude each other" in message
    assert (
        "--pulse-backbone uvit-s with these options differs from the backbone of --pulse-plan"
    ) in message


def test_a_broken_plan_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, FOLD_EXACT))
    record = unsealed_record(plan)
    record["schedule"]["order"][0].pop()
    record["pipeline"] = 2
    plan.write_text(json.dumps(record))
    message = refused(2, "--pulse-plan", str(plan))
    assert "is missing on device 0" in message


def test_a_plan_that_counts_other_parameters_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, FOLD_EXACT))
    save_plan(with_other_parameters(load_checked(plan)), plan)
    message = refused(2, "--pulse-plan", str(plan))
    assert "profile.layers.1.parameters is " in message and "in_blocks.0.attn" in message


def differ(folder: str) -> None:
    """Every rank's own file of the same name, as on nodes without shared storage."""
    os.chdir(Path(folder) / os.environ["RANK"])
    train([*BASE, "--pulse-plan", "plan.json", "--train-iters", "1"])


def test_ranks_with_different_plans_are_refused(tmp_path: Path) -> None:
    for rank, layout in enumerate((FOLD_EXACT, ROW)):
        (tmp_path / str(rank)).mkdir()
        make_plan(tmp_path / str(rank) / "plan.json", Config(2, 1, 1, 2, layout))
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, differ, str(tmp_path))
    assert said_once(error.value, "rank 1 makes another plan than rank 0")
    assert said_once(error.value, "--pulse-plan FILE")


def test_a_run_has_the_optimizer_where_its_plan_has_it(tmp_path: Path) -> None:
    config = Config(2, 1, 1, 2, FOLD_EXACT, split=True, distributed_optimizer=True)
    plan = str(make_plan(tmp_path / "plan.json", config, optimizer_cpu_offload=True))
    obeyed = run(2, "--pulse-plan", plan, *STEPS[2:], backbone="none")
    flags = ["--use-distributed-optimizer", "--optimizer-cpu-offload"]
    assert_same(obeyed, alone(*flags, *STEPS))
    here = str(make_plan(tmp_path / "here.json", config))
    assert "--optimizer-cpu-offload True, but --pulse-plan says False" in refused(
        2, "--pulse-plan", here, "--optimizer-cpu-offload"
    )


def test_auto_plans_for_an_optimizer_on_the_host(tmp_path: Path) -> None:
    flags = [*TINY["uvit"], "--pulse-auto", "--global-batch-size", str(BATCH), "--bf16"]
    flags += ["--use-distributed-optimizer", "--optimizer-cpu-offload", "--save", str(tmp_path)]
    got = run(2, *flags, "--train-iters", "2", backbone="none")
    assert len(got.losses) == 2 and None not in got.losses
    plan = load_checked(tmp_path / "plan.json")
    assert plan.optimizer_cpu_offload and plan.distributed_optimizer
    assert " --optimizer-cpu-offload" in equivalent_flags(plan)


def test_auto_measures_tunes_and_runs(tmp_path: Path) -> None:
    flags = [
        *("--pulse-backbone", "uvit-tiny"),
        *(part for key, value in UVIT.items() for part in ("--pulse-option", f"{key}={value}")),
        *("--pulse-auto", "--global-batch-size", "4", "--save", str(tmp_path)),
    ]
    first = run(2, *flags, "--train-iters", "2", backbone="none")
    assert len(first.losses) == 2 and None not in first.losses
    plan = load_checked(tmp_path / "plan.json")
    assert plan.world_size == 2 and plan.global_batch_size == 4
    assert plan.micro_batch_size == 2  # asked for
    # Started again it is the same job, with the same plan, further on.
    written = (tmp_path / "plan.json").read_bytes()
    assert len(run(2, *flags, "--train-iters", "3", backbone="none").losses) == 1
    assert (tmp_path / "plan.json").read_bytes() == written
    message = refused(1, *flags)
    assert "was made for another job (uvit-tiny on 2 ranks)" in message


def test_a_run_has_the_memory_format_of_its_plan_or_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless an option says another, which is told of a profile here, of a plan at the start."""
    from megatron_pulse.integration.setup import prepare, read_command_line

    sizes = {"sample_size": 8, "block_out_channels": "8,16", "norm_num_groups": 4}
    made = make_plan(
        tmp_path / "plan.json",
        Config(2, 1, 1, 2, ROW),
        "unet-tiny",
        sizes | {"channels_last": True},
    )
    plan = ["--pulse-plan", str(made), "--pulse-data", "digits8", "--lr", "1", "--train-iters", "5"]
    save_profile(load_checked(made).profile, tmp_path / "p.json")
    flags = [*TINY["unet"], *BASE, *STEPS, "--pipeline-model-parallel-size", "2"]
    flags += ["--pulse-placement", "sequential", "--pulse-profile", str(tmp_path / "p.json")]
    other = ["--pulse-option", "channels_last=false"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    def is_channels_last(*argv: str) -> bool:
        monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *argv])
        planned, _, _ = prepare(*read_command_line())
        found: bool = planned.backbone.record["options"]["channels_last"]
        return found

    assert is_channels_last(*plan) and is_channels_last(*plan, *TINY["unet"])
    assert not is_channels_last(*plan, *other)
    assert is_channels_last(*flags) and "warning" not in capsys.readouterr().out
    assert not is_channels_last(*flags, *other)
    assert "has channels_last convolutions, the run contiguous" in capsys.readouterr().out
