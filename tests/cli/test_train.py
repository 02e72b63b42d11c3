"""``pulse train``: the recipe's training is that of its flags, with weights imported once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.cli.train_command import import_weights
from megatron_pulse.errors import UserError
from megatron_pulse.integration.checkpoint.published_weights import load_whole, weights_of
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.recipe.keys import Model
from tests.integration.runs import BASE, run
from tests.integration.test_families import FAMILIES, write_latents
from tests.integration.test_process import write_pipeline
from tests.ranks import run_ranks


def weights_in(run_folder: Path) -> dict[str, torch.Tensor]:
    _, stage = load_whole(read_saved_run(run_folder), averaged=False)
    return dict(weights_of(stage))


def train(recipe: Path, *words: str) -> str:
    """Output of a ``pulse train`` process, which must succeed."""
    command = [sys.executable, "-m", "megatron_pulse.cli", "train", str(recipe), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "WANDB_MODE": "disabled"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _train_as_a_rank(words: list[str]) -> None:
    """As in a process that torchrun or srun starts."""
    assert main(["train", *words]) == 0


def test_imports_trains_and_resumes_as_the_flags_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_pipeline(tmp_path / "published", "dit")
    write_latents(tmp_path / "latents", FAMILIES["dit"])
    output, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        output = "{output}"
        model.weights = "{tmp_path / "published"}"
        data.source = "latents:{tmp_path / "latents"}"
        training = {{ steps = 1, batch_size = 4, micro_batch_size = 2 }}
        optimizer = {{ lr = 1e-3, clip_grad = 1.0 }}
        parallel = {{ pipeline = 2, solver = "none", timeout_s = 60 }}
        validation.batches = 0
        """
    )
    run_ranks(2, _train_as_a_rank, [str(recipe)])
    assert read_saved_run(output / "checkpoints").iteration == 1
    said = train(recipe, "training.steps=2", "parallel.pipeline=1")
    assert "importing" not in said and f"weights: {output / 'checkpoints'}" in said
    assert tomllib.loads((output / "recipe.toml").read_text())["training"]["steps"] == 2

    assert main(["train", str(recipe), "training.steps=2", "--print"]) == 0
    printed = capsys.readouterr().out.replace("\\\n", "").split()
    flags = printed[printed.index("-m") + 2 :]
    flags[flags.index("--save") + 1] = str(tmp_path / "by_flags")
    flags += ["--tensorboard-dir", str(tmp_path / "tensorboard"), "--save-interval", "1"]
    run(2, *flags, backbone="none")
    by_flags, by_recipe = (weights_in(at) for at in (tmp_path / "by_flags", output / "checkpoints"))
    assert by_flags.keys() == by_recipe.keys()
    assert all(torch.equal(by_flags[name], by_recipe[name]) for name in by_flags)


def test_other_weights_need_another_folder(tmp_path: Path):
    (tmp_path / "imported").mkdir()
    model = Model(weights="hf:some/model")
    identity = {"weights": "hf:some/model", "controlnet": None, "null_class": False}
    flags = ["--pulse-backbone", "dit-tiny"]
    record = tmp_path / "imported.json"
    record.write_text(json.dumps({"of": identity, "flags": flags}))
    found = import_weights(model, tmp_path)
    assert found.flags == tuple(flags)
    assert found.pretrained == ("--pretrained-checkpoint", str(tmp_path / "imported"))
    with pytest.raises(UserError, match="was made of other weights .hf:some/model"):
        import_weights(replace(model, weights="hf:another/model"), tmp_path)
    record.write_text("{")
    with pytest.raises(UserError, match="imported.json is damaged"):
        import_weights(model, tmp_path)
    cascade = Model(weights=str(tmp_path), backbone="cascade:high=dit-tiny,low=dit-tiny")
    with pytest.raises(UserError, match="a cascade has the weights of its chains. Leave the key"):
        import_weights(cascade, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="there is no such file or folder"):
        import_weights(Model(weights=str(tmp_path / "none")), tmp_path / "elsewhere")


def test_a_run_goes_on_with_the_weights_of_its_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter reads a folder in its place, and with tensor parallelism imports it."""
    (tmp_path / "published").mkdir()  # what it holds is read after the choice
    output, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        output = "{output}"
        model.weights = "{tmp_path / "published"}"
        adapter.type = "lora"
        data.source = "digits8"
        training = {{ steps = 1, batch_size = 4, micro_batch_size = 2 }}
        optimizer.lr = 1e-3
        """
    )
    shown = ["train", str(recipe), "--print"]
    main(shown)
    in_place = f"--pulse-module diffusers:{tmp_path / 'published'}"
    assert in_place in capsys.readouterr().out
    (output / "checkpoints").mkdir(parents=True)
    (output / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    assert main([*shown, "parallel.tensor=2"]) == 2
    assert "Give parallel.tensor 1, or another output" in capsys.readouterr().err
    (output / "imported").mkdir()
    identity = {"weights": str(tmp_path / "published"), "controlnet": None, "null_class": False}
    flags = ["--pulse-backbone", "dit-tiny"]
    (output / "imported.json").write_text(json.dumps({"of": identity, "flags": flags}))
    main(shown)
    said = capsys.readouterr().out
    assert f"--pretrained-checkpoint {output / 'imported'}" in said and in_place not in said


def test_a_checkpoint_of_an_imported_module_names_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    unet = diffusers.UNet2DModel(**sizes, **blocks, block_out_channels=(8,), layers_per_block=1)
    unet.save_pretrained(tmp_path / "unet")
    checkpoint = tmp_path / "checkpoint"
    process = ["--objective", "epsilon", "--noise-schedule", "linear"]
    assert (
        main(["import", "--from", str(tmp_path / "unet"), "--to", str(checkpoint), *process]) == 0
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        output = "{tmp_path / "run"}"
        model.weights = "{checkpoint}"
        data.source = "digits8"
        training = {{ steps = 1, batch_size = 4, micro_batch_size = 2 }}
        optimizer.lr = 1e-3
        """
    )
    capsys.readouterr()
    assert main(["train", str(recipe), "--print"]) == 0
    said = capsys.readouterr().out
    assert f"--pretrained-checkpoint {checkpoint}" in said
    assert "--pulse-module diffusers:UNet2DModel" in said
    assert "--pulse-option norm_num_groups=4" in said


def _steps_of(argv: list[str]) -> int:
    from megatron_pulse.integration.setup import prepare, read_command_line

    sys.argv = ["pretrain_diffusion.py", *argv]
    line, options, given = read_command_line()
    assert not line.faults, line.faults
    opened = line.opened["data"]
    assert prepare(line, options, given)[1] is opened, "the data were opened twice"
    return int(line.args.train_iters)


def test_epochs_become_steps():
    flags = ["--pulse-backbone", "uvit-tiny", "--pulse-option", "in_channels=1", *BASE]
    flags += ["--global-batch-size", "100"]
    (once,), (half,) = (
        run_ranks(1, _steps_of, [*flags, "--pulse-epochs", epochs]) for epochs in ("1", "0.5")
    )
    assert once == 17 and half == 9  # 1,617 of the 1,797 digits are not held back


def test_epochs_exclude_steps():
    assert run_ranks(1, _fault_of_both)[0].startswith("--pulse-epochs excludes --train-iters")


def _fault_of_both() -> str:
    from megatron_pulse.integration.setup import read_command_line

    sys.argv = ["x", "--pulse-backbone", "uvit-tiny", *BASE, "--train-iters", "3"]
    sys.argv += ["--pulse-epochs", "1"]
    line, _, _ = read_command_line()
    return line.faults[0]
