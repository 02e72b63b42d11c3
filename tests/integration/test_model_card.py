"""A run from an imported pipeline becomes a whole pipeline again, with a card that says how."""

from __future__ import annotations

import shlex
from pathlib import Path

import diffusers
import pytest
import torch
import yaml

from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.folders import BEST
from megatron_pulse.planner.plan_file.plan_file import save_plan
from tests.integration.runs import run
from tests.plans import small_plan

RECIPE = 'output = "runs/digits"\n\n[optimizer]\nlr = 1e-3\n'


def test_trained_pipeline_is_exported_with_its_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, save = tmp_path / "base", tmp_path / "run" / "checkpoints"
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8,), layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4,
    )  # fmt: skip
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    assert main(["import", "--from", str(base), "--to", str(tmp_path / "imported")]) == 0
    words = capsys.readouterr().out.splitlines()[-1].partition("train it with ")[2]
    flags = [*shlex.split(words), "--pulse-class-dropout", "0", "--save", str(save)]
    flags += ["--global-batch-size", "4", "--eval-interval", "1", "--save-interval", "1"]
    done = run(1, *flags, "--train-iters", "2", "--pulse-keep-best", backbone="none")
    (save.parent / "recipe.toml").write_text(RECIPE)
    index = base / "model_index.json"
    index.write_text(index.read_text().replace("DDPMScheduler", "DDIMScheduler"))
    save_plan(small_plan(), save / "plan.json")
    target = tmp_path / "pipeline"
    exported = ["export", "--load", str(save), "--iteration", BEST, "--raw", "--to", str(target)]
    assert main([*exported, "--pipeline"]) == 0
    best = 1 + done.validation.index(min(done.validation))
    said = capsys.readouterr().out
    pipeline = diffusers.DiffusionPipeline.from_pretrained(target)
    assert type(pipeline) is diffusers.DDPMPipeline and f"no other component of {base}" in said
    assert type(pipeline.scheduler) is diffusers.DDPMScheduler
    assert "DDIM" not in (target / "model_index.json").read_text()
    pictures = pipeline(num_inference_steps=1, output_type="np").images
    assert pictures.shape == (1, 8, 8, 1)
    trained = pipeline.unet.state_dict()
    assert any(not torch.equal(value, trained[name]) for name, value in unet.state_dict().items())
    head, card = (target / "README.md").read_text().split("---\n", 2)[1:]
    assert yaml.safe_load(head) == {
        "library_name": "diffusers",
        "license": "mit",
        "pipeline_tag": "unconditional-image-generation",
        "tags": ["diffusers", "diffusers-training", "megatron_pulse"],
    }
    for words in (
        f"| steps | {best}, {4 * best} samples |", "| batch | 4 samples |",
        "| learning rate | 0.001, constant, adam |", "| data | digits8 |",
        "| process | epsilon, linear betas", "| weights here | as trained, float32 |",
        "DiffusionPipeline.from_pretrained(FOLDER)  # DDPMPipeline",
        small_plan().heading, "schedule: ", "; bubble ", f"```toml\n{RECIPE}```",
    ):  # fmt: skip
        assert words in card, words
