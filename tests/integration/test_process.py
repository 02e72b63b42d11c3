"""The process of a checkpoint: taken by who continues it, or refused where flags differ."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.diffusion.published import write_folder
from megatron_pulse.diffusion.scheduler_import import process_of_scheduler
from megatron_pulse.integration.checkpoint.diffusion_process import continued_process, saved_process
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.flags.startup_checks import FlagError
from model_specs import load_backbone, published_form
from tests.diffusion.schedulers import PUBLISHED
from tests.integration.runs import BASE, run
from tests.integration.test_families import FAMILIES, write_latents

SCHEDULERS = {
    "uvit": "sd-v1.5",
    "sd": "sd-v1.5",
    "sdxl": "sdxl-zero-snr",
    "hunyuan": "hunyuan-dit-v1.2",
    "dit": "dit",
    "pixart": "pixart",
    "sd3": "sd3",
    "flux": "flux-dev",
    "suv": "sd3",
}


def options_of(family: str) -> dict[str, str]:
    return dict(option.split("=", 1) for option in FAMILIES[family].options)


def write_pipeline(folder: Path, family: str) -> list[str]:
    """Random weights as published, with the pipeline's scheduler; what ``pulse import`` takes."""
    from megatron_pulse.backbone.published_weights import to_published
    from megatron_pulse.diffusion.published import write_state_dict
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    backbone = load_backbone(FAMILIES[family].backbone, options_of(family))
    published = published_form(backbone)
    assert published is not None
    tensors = to_published(published, weights_of(whole_stage(backbone, initialise=True)))
    scheduler = PUBLISHED[SCHEDULERS[family]]
    if published.library == "diffusers":
        write_folder(folder / "transformer", published, tensors)
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
        return ["--from", str(folder)]
    write_state_dict(folder / "model.pth", tensors, scheduler)
    return ["--from", str(folder / "model.pth"), "--backbone", backbone.name]


def pulse(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """A command that must succeed, and what it says."""
    code = main([str(text) for text in argv])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "sd"])  # as "sdxl"
def test_through_import_training_sampling_and_export(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process stays the same throughout, and an import of the export recovers it."""
    source = write_pipeline(tmp_path, name)
    imported, trained = tmp_path / "imported", tmp_path / "trained"
    said = pulse(capsys, "import", *source, "--to", imported)
    process = process_of_scheduler(PUBLISHED[SCHEDULERS[name]])
    saved = read_saved_run(imported)
    assert saved.process == process
    assert f"process: {process.describe(saved.load_backbone().image_tokens)}\n" in said
    backbone = load_backbone(FAMILIES[name].backbone, options_of(name))

    write_latents(tmp_path / "latents", FAMILIES[name])
    flags = ["--pulse-backbone", backbone.name, "--pulse-data", f"latents:{tmp_path / 'latents'}"]
    for option in FAMILIES[name].options:
        flags += ["--pulse-option", option]
    run(
        1, *flags, "--global-batch-size", "4", "--train-iters", "1", "--eval-iters", "0",
        "--load", str(imported), "--save", str(trained), "--save-interval", "1",
        backbone="none",
    )  # fmt: skip
    saved = read_saved_run(trained)
    assert saved.process == process and saved.process.scheduler == process.scheduler

    # Latents of 4 or 16 channels need a decoder to be a picture: stop before that.
    from megatron_pulse.integration.sampling import (
        Sampler,
        load_model,
        request_from_data,
        sample_images,
    )

    model = load_model(trained, averaged=True)
    assert model.process == process.for_tokens(backbone.image_tokens)
    latents = sample_images(
        model, request_from_data(model, [0]), Sampler(2, 1.0, seed=0), progress=False
    )
    assert latents.isfinite().all()

    suffix = ".pth" if name in ("uvit", "suv") else ""
    exported = tmp_path / f"exported{suffix}"
    pulse(capsys, "export", "--load", trained, "--to", exported)
    again = tmp_path / "again"
    more = ["--backbone", backbone.name] if suffix else []
    pulse(capsys, "import", "--from", exported, *more, "--to", again)
    assert read_saved_run(again).process == process
    if not suffix:
        import diffusers

        class_name = PUBLISHED[SCHEDULERS[name]]["_class_name"]
        written = getattr(diffusers, class_name).from_pretrained(exported, subfolder="scheduler")
        assert process_of_scheduler(dict(written.config)).describe() == process.describe()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported Hunyuan-DiT."""
    folder = tmp_path_factory.mktemp("imported")
    write_pipeline(folder, "hunyuan")
    assert main(["import", "--from", str(folder), "--to", str(folder / "checkpoint")]) == 0
    write_latents(folder / "latents", FAMILIES["hunyuan"])
    return folder


Prepare = Callable[..., Any]


@pytest.fixture
def prepare(imported: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """A run of the Hunyuan-DiT up to where ranks would meet: its arguments and data."""

    def up_to_the_start(*flags: str) -> Any:
        from megatron_pulse.integration.setup import prepare, read_command_line

        base = [*BASE, "--global-batch-size", "4", "--train-iters", "1"]
        base += ["--pulse-backbone", FAMILIES["hunyuan"].backbone]
        base += ["--pulse-data", f"latents:{imported / 'latents'}"]
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *base, *flags])
        line, options, given = read_command_line()
        _, data, _ = prepare(line, options, given)
        return line.args, data

    return up_to_the_start


DOORS = ["--load", "--pretrained-checkpoint"]


@pytest.mark.parametrize("door", DOORS)
def test_taken_from_the_checkpoint(door: str, imported: Path, prepare: Prepare) -> None:
    args, data = prepare(door, str(imported / "checkpoint"))
    expected = process_of_scheduler(PUBLISHED["hunyuan-dit-v1.2"])
    assert data.process == expected
    assert DiffusionProcess(**args.pulse_process).scheduler == expected.scheduler
    same = ["--pulse-objective", "v", "--pulse-beta-end", "0.018"]
    assert prepare(door, str(imported / "checkpoint"), *same)[1].process == expected


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pulse-objective", "epsilon"], "objective is v there and epsilon here"),
        (
            ["--pulse-objective", "flow"],
            "flow here (flow has no noise schedule, v scaled",
        ),
        (
            ["--pulse-noise-schedule", "linear"],
            "0.00085 to 0.018 there and linear betas 0.0001",
        ),
        (["--pulse-beta-end", "0.03"], "beta_end is 0.018 there and 0.03 here"),
        (["--pulse-zero-terminal-snr"], "zero_terminal_snr is False there and True here"),
        (["--pulse-num-timesteps", "500"], "num_timesteps is 1000 there and 500 here"),
        (["--pulse-flow-shift", "3"], "only for flow"),
    ],
)
def test_contradictions_are_refused(
    door: str, flags: list[str], words: str, imported: Path, prepare: Prepare
) -> None:
    given = [door, str(imported / "checkpoint"), *flags]
    with pytest.raises(FlagError) as error:
        prepare(*given, "--lr", "0")
    assert words in error.value.faults[0] + error.value.faults[1]
    assert len(error.value.faults) == 2, "the other fault is found as well"
    if "only for flow" in words:
        return
    assert "--pulse-new-process" in str(error.value)
    _, data = prepare(*given, "--pulse-new-process")
    said = dict(zip(flags[::2], flags[1::2], strict=False))
    assert data.process.objective == said.get("--pulse-objective", "v")
    assert data.process != process_of_scheduler(PUBLISHED["hunyuan-dit-v1.2"])


def test_a_new_process_needs_weights(prepare: Prepare) -> None:
    with pytest.raises(FlagError, match="has no initial weights"):
        prepare("--pulse-new-process")


def test_a_run_that_is_continued_keeps_its_process() -> None:
    saved = DiffusionProcess("v")
    with pytest.raises(ValueError, match="--pretrained-checkpoint"):
        continued_process(saved, ProcessChoice(objective="epsilon"), continued=True, new=True)
    flow = DiffusionProcess("flow", shift=3.0)
    shifted = ProcessChoice(flow_shift="dynamic", timestep_density="logit_normal")
    process = continued_process(flow, shifted, continued=True, new=False)
    assert process.shift == DynamicShift() and not process.differences(flow)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("epsilon", "linear", "logit_normal"), "epsilon, linear betas 0.0001 to 0.02"),
        (("v", "scaled_linear", "logit_normal"), "v, scaled_linear betas 0.00085 to 0.012"),
        (("flow", "scaled_linear", "logit_normal"), "flow, shift 1, times logit_normal(0, 1)"),
        (("flow", "cosine", "uniform"), "flow, shift 1, times uniform"),
    ],
)
def test_checkpoints_from_before_it_was_kept(flags: tuple[str, str, str], expected: str) -> None:
    names = ("pulse_objective", "pulse_noise_schedule", "pulse_timestep_density")
    old = argparse.Namespace(**dict(zip(names, flags, strict=True)))
    assert saved_process(old).describe() == f"{expected}, 1000 timesteps"


def test_tokens_of_the_picture() -> None:
    """As diffusers' pipelines count them: Flux packs 2 x 2, SD3 has patches of 2, at 1024 px."""
    assert load_backbone("flux-dev").image_tokens == 4096
    assert load_backbone("sd3-medium").image_tokens == 4096
    assert load_backbone("sd-v1.5").image_tokens == 4096
    assert load_backbone("uvit-tiny", {"image_size": 8, "patch_size": 2}).image_tokens == 16
    dynamic = chosen_process(ProcessChoice(flow_shift="dynamic"))
    assert "(3.158 at 4096 tokens)" in dynamic.describe(4096)
