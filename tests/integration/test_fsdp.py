"""Whole Megatron runs with FSDP2 and HSDP: numbers, checkpoints, pictures of other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_pulse.adapters.low_rank import is_factor
from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import save_cluster
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.runs import (
    BASE,
    STEPS,
    TINY,
    Run,
    alone,
    assert_equal_to_rounding,
    pipeline,
    run,
)
from tests.integration.test_dpo import place, whole  # noqa: F401
from tests.integration.test_families import FAMILIES, write_latents
from tests.integration.test_process import write_pipeline
from tests.integration.test_sample_pictures import EVERY, relative, samples_of, train_recording
from tests.integration.test_stragglers import FLAGS, spoil_gradients
from tests.planner.tune.problems import cluster
from tests.ranks import RanksFailed, run_ranks
from tests.reference import unsealed_record

FSDP = "--use-torch-fsdp2"
ONCE = ["--pulse-fsdp-gather", "step", "--pulse-fsdp-reduce", "step", "--pulse-fsdp-prefetch", "3"]


@pytest.mark.parametrize(
    ("backbone", "num_ranks", "flags", "common"),
    [
        ("uvit", 2, [*ONCE, "--pulse-fsdp-layers", "3"], []),
        ("uvit", 4, ["--tensor-model-parallel-size", "2"], ["--bf16"]),
        ("unet", 4, ["--pulse-fsdp-group", "2", "--recompute-granularity", "selective"], []),
        (
            "unet",
            2,
            [
                *("--recompute-granularity", "full", "--pulse-fsdp-layers", "3"),
                *("--pulse-fsdp-gather", "microbatch"),
            ],
            ["--pulse-freeze", "down_blocks.0.*", "--optimizer", "sgd"],
        ),
    ],
    ids=["once", "tensor", "hsdp", "frozen"],
)
def test_a_run_equals_one_process(
    backbone: str, num_ranks: int, flags: list[str], common: list[str]
) -> None:
    got = run(num_ranks, *STEPS, FSDP, *flags, *common, backbone=backbone)
    expected = alone(*STEPS, *common, backbone=backbone)
    if "--tensor-model-parallel-size" in flags:
        assert got.losses == pytest.approx(expected.losses, rel=1e-2)
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=2e-2)
        return
    expected.weights = expected.main_params
    assert_equal_to_rounding(got, expected)


@pytest.mark.parametrize("backbone", ["uvit", "unet"])
def test_checkpoints_cross_layouts(backbone: str, tmp_path: Path) -> None:
    """The optimizer's state and the EMA too: a fold, replicated shards, shards, one process."""
    layouts = [
        (2, [*pipeline(2), "--use-distributed-optimizer"]),
        (4, [FSDP, "--pulse-fsdp-group", "2"]),
        (2, [FSDP, "--pulse-fsdp-layers", "2"]),
        (1, ["--use-distributed-optimizer"]),
    ]
    if backbone == "uvit":  # an adapter's test has shards alone
        del layouts[2]
    batch = ["--global-batch-size", "8"]
    expected = alone(*batch, "--train-iters", str(len(layouts)), backbone=backbone)
    got: list[Run] = []
    for number, (num_ranks, flags) in enumerate(layouts):
        steps = ["--train-iters", str(number + 1), "--save", str(tmp_path), "--save-interval", "1"]
        got.append(run(num_ranks, *batch, *steps, *flags, backbone=backbone))
    assert [one.losses[0] for one in got] == pytest.approx(expected.losses, rel=1e-6)
    assert [one.grad_norms[0] for one in got] == pytest.approx(expected.grad_norms, rel=1e-5)
    for kind in ("main_params", "averages"):
        for name, value in getattr(expected, kind).items():
            torch.testing.assert_close(getattr(got[-1], kind)[name], value, rtol=1e-4, atol=5e-5)


def test_pictures_are_those_of_the_checkpoint_and_leave_training_alone(tmp_path: Path) -> None:
    steps = ["--global-batch-size", "8", "--train-iters", "2", "--pulse-ema-decay", "0.5"]
    flags = [*TINY["uvit"], *BASE, *steps, FSDP, *ONCE, "--eval-interval", "1"]
    without = run(2, *flags, backbone="none")
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    ranks = run_ranks(2, train_recording, [*flags, *save, *EVERY, "--pulse-sample-every", "1"])
    assert ranks[-1]["losses"] == without.losses and ranks[-1]["norms"] == without.grad_norms
    samples = ranks[-1]["samples"]
    for step in (1, 2):
        to = tmp_path / f"{step}.safetensors"
        theirs = samples_of(tmp_path / "run", step, to, "--classes", "3,5,9")
        assert relative(samples[step], theirs) <= 2e-6


def test_preference_training_exchanges_the_rows_with_those_of_the_reference(
    place: Path,  # noqa: F811
) -> None:
    expected = run(1, *whole(place), backbone="none")
    got = run(2, *whole(place, FSDP, *ONCE), backbone="none")
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "whole"])
def test_a_folder_in_half_precision_trains_in_fp32(tmp_path: Path, adapter: bool) -> None:
    """Its class makes bf16 parameters, of which one process has fp32 main parameters."""
    torch.manual_seed(1)
    module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    module.bfloat16().save_pretrained(tmp_path / "unet")
    argv = [*BASE, *STEPS, "--bf16", "--pulse-module", f"diffusers:{tmp_path / 'unet'}"]
    argv += ["--pulse-objective", "v", "--pulse-noise-schedule", "scaled_linear"]
    argv += ["--pulse-class-dropout", "0"]
    argv += ["--pulse-adapter", "lora"] if adapter else []
    expected = run(1, *argv, backbone="none")
    got = run(2, *argv, FSDP, backbone="none")
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert {values.dtype for values in got.main_params.values()} == {torch.float32}
    assert got.main_params.keys() == expected.main_params.keys()
    for name, values in got.main_params.items():
        torch.testing.assert_close(values, expected.main_params[name], rtol=1e-4, atol=5e-5)


def test_gradients_that_are_no_numbers_are_named() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, spoil_gradients, [*FLAGS, FSDP, *ONCE, "--train-iters", "3"], 4)
    text = "those of microbatch 1 in some replica are not finite from layer mid_block.mlp down"
    assert text in str(failed.value), str(failed.value)


def test_a_tuned_plan_is_checked_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units of unlike sizes and their collectives are those of the plan."""
    save_cluster(cluster(1, 2, intra_gbs=500.0, memory_gb=0.0045), tmp_path / "c.yaml")
    plan = str(tmp_path / "plan.json")
    tune = ["tune", "--backbone", "uvit-tiny", "--option", "in_channels=1", "--dtype", "float32"]
    tune += ["--cluster", str(tmp_path / "c.yaml"), "--global-batch-size", "8"]
    tune += ["--pipeline", "1", "--tensor", "1", "--micro-batch-size", "2"]
    assert main([*tune, "--seconds", "1", "--solver", "none", "-o", plan]) == 0
    assert main(["check", plan]) == 0 and main(["show", plan]) == 0
    assert "FSDP2 over 2 ranks: " in capsys.readouterr().out
    layout = load_checked(plan).fsdp
    assert layout is not None
    got = run(2, "--pulse-plan", plan, "--train-iters", "2", backbone="none")
    assert got.losses
    record = unsealed_record(plan)
    record["fsdp"] |= {"starts": [1, *layout.starts[1:]], "group": 3}
    Path(plan).write_text(json.dumps(record))
    assert main(["check", plan]) == 2
    said = capsys.readouterr().err
    assert "starts: they rise from 0" in said and "3 does not divide the 2 replicas" in said


def test_an_adapter_of_a_family_crosses_layouts_without_its_base(tmp_path: Path) -> None:
    given = write_pipeline(tmp_path / "published", "sd3")
    assert main(["import", *given, "--to", str(tmp_path / "start")]) == 0
    write_latents(tmp_path / "latents", FAMILIES["sd3"])
    words = ["--pulse-backbone", "sd3-tiny", "--pulse-data", f"latents:{tmp_path / 'latents'}"]
    words += ["--global-batch-size", "4", "--lr", "1e-2", "--pulse-ema-decay", "0.5"]
    words += ["--pulse-adapter", "lora", "--pulse-adapter-rank", "3", "--train-iters", "3"]
    words += ["--pretrained-checkpoint", str(tmp_path / "start"), "--use-distributed-optimizer"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    alone = run(1, *words, backbone="none")
    losses: list[float] = []
    for step, layout in enumerate(([FSDP], pipeline(2), [FSDP]), start=1):
        until = ["--exit-interval", str(step)]
        losses += run(2, *words, *layout, *save, *until, backbone="none").losses
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    held = dist_checkpointing.load_tensors_metadata(str(tmp_path / "run" / "iter_0000003"))
    assert {name for name in held if not is_factor(name)} == {"pos_embed.pos_embed"}  # a buffer
