"""Pictures drawn while a run trains: training's bits stay, pictures equal those of a checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from tests.data.captioned import captioned_digits
from tests.integration.runs import BASE, STEPS, TEXT, TINY, pipeline, run, train
from tests.integration.test_bad_input import refuse
from tests.integration.test_families import Family, write_buckets
from tests.ranks import RanksFailed, run_ranks, said_once

EVERY = [
    "--pulse-sample-every",
    "2",
    "--pulse-sample-steps",
    "3",
    "--pulse-sample-classes",
    "3,5,9",
]
STEP_4 = ["--global-batch-size", "8", "--train-iters", "4"]


def train_recording(argv: list[str]) -> dict[str, Any]:
    """``train``, with the samples that were written, by step."""
    from megatron_pulse.integration.loop.sample_pictures import SamplePictures

    if "--wandb-project" in argv:
        os.environ["WANDB_MODE"] = "offline"
    seen: dict[int, torch.Tensor] = {}
    write = SamplePictures._write

    def record(self: SamplePictures, samples: torch.Tensor, folder: Path, iteration: int) -> None:
        seen[iteration] = samples
        write(self, samples, folder, iteration)

    SamplePictures._write = record  # type: ignore[method-assign]
    return {**train(argv), "samples": seen}


def drawn(num_ranks: int, *argv: str, backbone: str = "uvit") -> dict[int, torch.Tensor]:
    """Samples of a run by step; the last rank writes them."""
    flags = [*TINY[backbone], *BASE, *argv]
    return run_ranks(num_ranks, train_recording, flags, timeout_s=240)[-1]["samples"]


def samples_of(load: Path, step: int, to: Path, *more: str) -> torch.Tensor:
    """Samples of ``pulse sample`` on one process."""
    flags = ["--steps", "3", "--per-class", "1", "--iteration", str(step), "-o", str(to)]
    assert main(["sample", "--load", str(load), *flags, *more]) == 0
    return load_file(to)["samples"]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_fold_trains_the_same_bits_and_draws_those_of_the_checkpoint(tmp_path: Path):
    save = ["--save", str(tmp_path / "run"), "--save-interval", "2"]
    flags = [*STEP_4, *pipeline(2), "--pulse-ema-decay", "0.5"]
    without = run(2, *flags)
    ranks = run_ranks(2, train_recording, [*TINY["uvit"], *BASE, *flags, *save, *EVERY])
    for name in ("losses", "norms"):
        assert ranks[-1][name] == getattr(without, {"norms": "grad_norms"}.get(name, name))
    for rank in ranks:
        for kind in ("weights", "averages"):
            for name, _, _, values in rank[kind]:
                assert torch.equal(values, getattr(without, kind)[name]), name
    samples = ranks[-1]["samples"]
    assert list(samples) == [0, 2, 4]
    for step in (2, 4):
        theirs = samples_of(
            tmp_path / "run", step, tmp_path / f"{step}.safetensors", "--classes", "3,5,9"
        )
        assert relative(samples[step], theirs) <= 2e-7
    assert not torch.equal(samples[2], samples[4])
    folder = tmp_path / "run" / "samples" / "step_4"
    names = ["0000.png", "0001.png", "0002.png", "sheet.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    pixels = np.asarray(Image.open(folder / "0001.png").convert("L"))
    expected = ((samples[4][1, 0].clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    assert np.array_equal(pixels, expected)


def test_sequence_with_replicas_and_shards_draws_the_same(tmp_path: Path):
    """Replicas share five pictures; predictions travel; EMA shards are gathered."""
    flags = [
        *pipeline(2, "--pulse-placement", "sequential"), *STEPS, "--save", str(tmp_path / "run"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--pulse-sample-every", "1", "--pulse-sample-steps", "3", "--pulse-ema-decay", "0.5"),
        *("--pulse-sample-classes", "0-4", "--pulse-sample-batch-size", "2"),
        *("--pulse-sample-folder", str(tmp_path / "pictures")),
    ]  # fmt: skip
    flags = [*TINY["uvit"], *BASE, *flags]
    ranks = run_ranks(4, train_recording, flags, timeout_s=240)
    without = flags[: flags.index("--pulse-sample-every")] + ["--pulse-ema-decay", "0.5"]
    without[without.index("--save") + 1] = str(tmp_path / "plain")
    plain = run_ranks(4, train, without, timeout_s=240)
    assert [r["losses"] for r in ranks] == [r["losses"] for r in plain]
    for mine, other in zip(ranks, plain, strict=True):
        for kind in ("weights", "main_params", "averages"):
            for (name, *_, one), (*_, two) in zip(mine[kind], other[kind], strict=True):
                assert torch.equal(one, two), (kind, name)
    samples = ranks[-1]["samples"]
    assert list(samples) == [0, 1, 2] and samples[2].shape == (5, 1, 8, 8)
    more = ["--classes", "0-4", "--batch-size", "2"]
    theirs = samples_of(tmp_path / "run", 2, tmp_path / "t.safetensors", *more)
    assert relative(samples[2], theirs) <= 2e-7
    assert (tmp_path / "pictures" / "step_1" / "0004.png").exists()


def test_prompts_are_encoded_by_the_run_and_latents_decoded(tmp_path: Path):
    from tests.cli.test_data import make_vae
    from tests.encoders.pipelines import LENGTH, make_pipeline

    encoders = make_pipeline(tmp_path / "sd", ("clip", 16, 16))
    make_vae(
        encoders / "vae", in_channels=1, out_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    prompts = ["a red heart", "the very old cat"]
    flags = [
        *pipeline(2), *STEPS, *TEXT, "--pulse-option", "in_channels=2",
        "--pulse-option", "out_channels=2", "--pulse-option", "sample_size=4",
        "--pulse-option", f"context_length={LENGTH}", "--pulse-data", captioned_digits(tmp_path),
        "--pulse-encoders", str(encoders), "--save", str(tmp_path / "run"),
        "--tensorboard-dir", str(tmp_path / "board"), "--wandb-project", "p",
        "--wandb-exp-name", "e", "--wandb-save-dir", str(tmp_path),
        *("--pulse-sample-every", "2", "--pulse-sample-steps", "3", "--pulse-sample-guidance", "3"),
        *("--pulse-sample-prompt", prompts[0], "--pulse-sample-prompt", prompts[1]),
        *("--pulse-sample-negative-prompt", "a bird", "--pulse-sample-count", "2"),
        "--pulse-sample-vae-tiling",
    ]  # fmt: skip
    samples = drawn(2, *flags, backbone="unet")
    said = [word for prompt in prompts for word in ("--prompt", prompt)]
    said += ["--negative-prompt", "a bird", "--guidance", "3", "--per-class", "2"]
    theirs = samples_of(tmp_path / "run", 2, tmp_path / "t.safetensors", *said)
    assert samples[2].shape == (4, 2, 4, 4) and relative(samples[2], theirs) <= 2e-7
    assert Image.open(tmp_path / "run" / "samples" / "step_2" / "0003.png").size == (8, 8)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(events.Tags()["images"]) == {"samples", *(f"samples/{i}" for i in range(4))}
    assert [event.step for event in events.Images("samples/0")] == [0, 2]
    shown = [path.name for path in tmp_path.glob("wandb/offline*/files/media/images/*.png")]
    assert len([name for name in shown if name.startswith("samples_")]) == 2 * len(samples[2])
    assert len([name for name in shown if name.startswith("samples sheet_")]) == 2


def told_to_stop(folder: str) -> tuple[list[float], str]:
    """Train, and get SIGTERM on one rank in the middle of the pictures of step 2."""
    from megatron_pulse.integration.loop.forward_backward import PulseSchedule
    from tests.integration.test_stopping import before_call, tell

    before_call(PulseSchedule, "predict", 4, lambda: tell((1,), signal.SIGTERM))
    flags = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "4", "--save", folder]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses = train([*flags, "--train-iters", "100000", *EVERY])["losses"]
    return losses, out.getvalue()


def test_stop_request_among_pictures_ends_them_and_saves(tmp_path: Path):
    (losses, said), _ = run_ranks(2, told_to_stop, str(tmp_path))
    assert len(losses) == 3
    assert "stop request: no pictures of step 2" in said
    assert f"stopped (SIGTERM) after step 3: saved in {tmp_path}" in said
    assert not (tmp_path / "samples" / "step_2").exists()


def failing(folder: str) -> None:
    """Train, and fail on one rank in the middle of the pictures of step 0."""
    from megatron_pulse.runtime.executor import Executor
    from tests.integration.test_stopping import before_call

    def act() -> None:
        if os.environ["RANK"] == "1":
            raise ArithmeticError("as tested")

    before_call(Executor, "_forward", 5, act)
    train([*TINY["uvit"], *BASE, *pipeline(2), *STEPS, "--save", folder, *EVERY])


def test_failure_among_pictures_ends_all_ranks_with_its_reason(tmp_path: Path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, failing, str(tmp_path))
    assert said_once(failed.value, "rank 1 stops; first failure in this job: rank 1: ")
    assert "Traceback" not in failed.value.outputs[0]


def test_resumed_run_draws_its_first_step_and_warns_of_a_folder_it_cannot_write(tmp_path: Path):
    flags = [*STEPS, "--save", str(tmp_path), *EVERY, "--pulse-sample-raw"]
    first = drawn(1, *flags, "--exit-interval", "1", "--save-interval", "1")
    (tmp_path / "samples" / "step_2").write_text("a file")
    before = tmp_path / "samples" / "step_1"  # pictures of before, beside a file of the user's
    before.mkdir()
    for name in ("0009.png", "sheet.png", "notes.txt"):
        (before / name).write_text("old")
    again = drawn(1, *flags)
    assert list(first) == [0] and list(again) == [1, 2]
    assert (tmp_path / "samples" / "step_2").read_text() == "a file", "the run went on"
    theirs = samples_of(tmp_path, 1, tmp_path / "t.safetensors", "--classes", "3,5,9", "--raw")
    assert relative(again[1], theirs) <= 2e-7
    assert Image.open(before / "sheet.png").size and not (before / "0009.png").exists()
    assert (before / "notes.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("backbone", "flags", "said"),
    [
        ("uvit", ["--pulse-sample-classes", "8-12"], "the model has classes 0-9, not 10, 11, 12"),
        ("uvit", ["--pulse-sample-prompt", "seven"], "does not name its text encoders"),
        ("uvit", ["--pulse-sample-steps", "2000"], "num_steps is 2000; use 1 to 1000"),
        ("uvit", ["--pulse-sample-vae", "vae"], "decodes latents, but the run trains on pixels"),
        (
            "uvit",
            [
                "--pulse-sample-prompt",
                "a",
                "--pulse-sample-from-data",
                "1",
                "--pulse-data",
                "mnist",
            ],
            "exclude each other",
        ),
    ],
)
def test_pictures_that_cannot_be_are_refused_at_the_start(
    backbone: str, flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    good = [*TINY[backbone], *BASE, *STEPS, "--save", str(tmp_path), "--pulse-sample-every", "2"]
    faults = refuse(monkeypatch, 1, flags, good)
    assert any(said in fault for fault in faults), faults


def test_flags_of_pictures_without_an_interval_are_refused(monkeypatch: pytest.MonkeyPatch):
    good = [*TINY["uvit"], *BASE, *STEPS, "--pulse-sample-steps", "3"]
    (fault,) = refuse(monkeypatch, 1, [], good)
    assert "--pulse-sample-every is missing: --pulse-sample-steps is for pictures" in fault


FLUX2 = [
    *("--pulse-backbone", "diffusers:Flux2Transformer2DModel", "--pulse-flow-shift", "dynamic"),
    *(
        f"--pulse-option={option}"
        for option in (
            "in_channels=3", "num_layers=1", "num_single_layers=1", "attention_head_dim=16",
            "num_attention_heads=2", "joint_attention_dim=16", "axes_dims_rope=4,4,4,4",
            "timestep_guidance_channels=16", "guidance_embeds=false", "height=4", "width=4",
            "text_length=6",
        )
    ),
]  # fmt: skip
"""A class whose pipeline's shift depends on the number of steps."""
SEVERAL = Family("dit-tiny", options=("in_channels=1", "out_channels=1"), buckets="8x4,4x12")
# (ranks, backbone, flags of the run, flags of pulse sample, largest relative difference)
OTHERS: dict[str, tuple[int, str, list[str], list[str], float]] = {
    "replicated embedders, routed skips": (
        2, "unet", pipeline(2, "--pulse-placement", "sequential", "--pulse-conditioning",
        "replicate"), ["--classes", "0-9"], 2e-7,
    ),
    "bf16": (2, "uvit", [*pipeline(2), "--bf16"], ["--classes", "0-9"], 0.05),
    "tensor parallelism": (
        2, "uvit", ["--tensor-model-parallel-size", "2"], ["--classes", "0-9"], 1e-5,
    ),
    "self-conditioning": (
        2, "unet", pipeline(2, "--pulse-option", "in_channels=2", "--pulse-self-conditioning",
        "1"), ["--classes", "0-9"], 2e-7,
    ),
    "words": (
        1, "unet", [*TEXT, "--pulse-sample-prompt", "a dark digit"],
        ["--prompt", "a dark digit"], 2e-7,
    ),
    "conditioning of the data": (
        2, "unet", [*pipeline(2), *TEXT, "--pulse-sample-from-data", "2"],
        ["--from-data", "2"], 2e-7,
    ),
    "stochastic DDIM": (
        2, "uvit", pipeline(2, "--pulse-objective", "v", "--pulse-sample-eta", "0.5"),
        ["--classes", "0-9", "--eta", "0.5"], 2e-7,
    ),
    "a class's own shift": (
        1, "none", [*FLUX2, "--pulse-sample-from-data", "2"], ["--from-data", "2"], 2e-7,
    ),
    "the first of several sizes": (
        2, "none", pipeline(2, "--pulse-backbone", SEVERAL.backbone, *(
            f"--pulse-option={option}" for option in SEVERAL.every_option
        )),
        ["--classes", "0-9"], 2e-7,
    ),
}  # fmt: skip


def write_texts(folder: Path) -> str:
    """Random latents with random states of texts."""
    layout = LatentLayout((3, 4, 4), 1, LatentType.FLOAT32, {"context": FieldSpec((6, 16))})
    with LatentWriter(folder, layout) as writer:
        for _ in range(40):
            writer.add(torch.randn(3, 4, 4), 0, {"context": torch.randn(6, 16)})
        writer.close()
    return f"latents:{folder}"


@pytest.mark.parametrize("case", OTHERS)
def test_pictures_of_other_runs_are_those_of_the_checkpoint(case: str, tmp_path: Path):
    num_ranks, backbone, flags, more, most = OTHERS[case]
    if backbone == "unet" and TEXT[0] in flags:
        flags = [*flags, "--pulse-data", captioned_digits(tmp_path)]
    if FLUX2[0] in flags and "diffusers:" in flags[flags.index(FLUX2[0]) + 1]:
        flags = [*flags, "--pulse-data", write_texts(tmp_path / "latents")]
    if SEVERAL.backbone in flags:
        flags = [*flags, "--pulse-data", write_buckets(tmp_path / "latents", SEVERAL)]
    pictures = ["--pulse-sample-every", "2", "--pulse-sample-steps", "3"]
    flags = [*STEPS, *flags, *pictures, "--save", str(tmp_path / "run")]
    samples = drawn(num_ranks, *flags, backbone=backbone)
    theirs = samples_of(tmp_path / "run", 2, tmp_path / "t.safetensors", *more)
    assert samples[2].shape == theirs.shape and relative(samples[2], theirs) <= most
