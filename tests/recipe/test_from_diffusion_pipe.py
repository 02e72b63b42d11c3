"""Configurations of diffusion-pipe: what is taken over is right, what is not is listed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from megatron_pulse.errors import UserError
from megatron_pulse.recipe.flags import training_flags
from megatron_pulse.recipe.from_diffusion_pipe import _SAME, _WITHOUT, converted
from megatron_pulse.recipe.read import read_recipe

CONFIG = """
output_dir = "/runs/flux"
dataset = "pictures.toml"
max_steps = 500
epochs = 7
micro_batch_size_per_gpu = 2
gradient_accumulation_steps = 4
pipeline_stages = 2
gradient_clipping = 0.5
warmup_steps = 20
activation_checkpointing = true
save_every_n_steps = 50
blocks_to_swap = 4
mystery = 1

[model]
type = "flux"
diffusers_path = "/models/flux"
dtype = "bfloat16"
flux_shift = true
transformer_dtype = "float8"

[adapter]
type = "lora"
rank = 8

[optimizer]
type = "adamw_optimi"
lr = 2e-5
betas = [0.9, 0.99]
"""
DATASET = """
resolutions = [512]
enable_ar_bucket = true
num_repeats = 1
num_ar_buckets = 7
caption_prefix = "ohwx, "
shuffle_tags = true
min_ar = 0.4
[[directory]]
path = "/pictures/a"
num_repeats = 3
[[directory]]
path = "/pictures/b"
mask_path = "/pictures/masks"
"""


def convert(tmp_path: Path, config: str = CONFIG, dataset: str | None = DATASET) -> str:
    (tmp_path / "main.toml").write_text(config)
    if dataset is not None:
        (tmp_path / "pictures.toml").write_text(dataset)
    return converted(tmp_path / "main.toml")


def test_settings_are_taken_over_or_listed(tmp_path: Path):
    text = convert(tmp_path)
    assert tomllib.loads(text) == {
        "output": "/runs/flux",
        "model": {"weights": "/models/flux"},
        "adapter": {"type": "lora", "rank": 8, "targets": ["*blocks.*"]},
        "quantization": {"type": "fp8"},
        "data": {
            "sources": [
                {"path": "captions:/pictures/a", "repeats": 3, "caption_prefix": "ohwx, "},
                {"path": "captions:/pictures/b", "caption_prefix": "ohwx, "},
            ],
            "shuffle_tags": True,
            "resolution": 512,
            "buckets": "auto",
            "max_buckets": 7,
        },
        "encoders": {"folder": "/models/flux"},
        "process": {"flow_shift": "dynamic"},
        "training": {"batch_size": 8, "steps": 500, "micro_batch_size": 2, "dtype": "bf16"},
        "optimizer": {
            "clip_grad": 0.5,
            "warmup_steps": 20,
            "type": "adam",
            "lr": 2e-5,
            "betas": [0.9, 0.99],
        },
        "parallel": {"auto": True, "offload_weights": ["*"], "pipeline": 2},
        "checkpoint": {"every": 50},
    }
    for part in (
        "epochs = 7: max_steps ends the run",
        "activation_checkpointing = True: the plan decides it",
        "mystery = 1: unknown",
        "dataset.min_ar = 0.4: buckets auto have aspect ratios",
        "dataset /pictures/b: mask_path",
    ):
        assert f"#   {part}" in text


def test_converted_recipe_makes_flags(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(convert(tmp_path))
    words, _ = training_flags(read_recipe(path).recipe)
    assert words[words.index("--global-batch-size") + 1] == "8"
    assert "captions:/pictures/a*3,captions:/pictures/b" in words
    assert words.count("--pulse-caption-prefix") == 2
    assert "--bf16" in words and "--pulse-auto" in words


@pytest.mark.parametrize("key", sorted({*_SAME, *_WITHOUT} - {"epochs"}))
def test_no_key_vanishes(tmp_path: Path, key: str):
    """Each known key changes the recipe or is listed, in whichever file and table it stands."""

    def made(given: bool) -> str:
        config = {
            "dataset": "pictures.toml",
            "model": {"type": "flux"},
            "optimizer": {},
            "adapter": {},
            "monitoring": {"enable_wandb": True},
        }
        directory = {"path": "/pictures"}
        dataset = {"directory": [directory]}
        table, _, name = key.rpartition(".")
        places = {"": config, "dataset": dataset, "dataset.directory": directory}
        if given:
            places.get(table, config.get(table))[name] = 3
        return convert(tmp_path, tomli_w.dumps(config), tomli_w.dumps(dataset))

    assert made(given=True) != made(given=False)


def test_missing_dataset_and_learning_rate_are_said(tmp_path: Path):
    text = convert(tmp_path, CONFIG.replace("lr = 2e-5", ""), None)
    assert "dataset = 'pictures.toml': there is no such file" in text
    assert "optimizer.lr = 1e-05 is a guess" in text


def test_unreadable_configuration_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="No such file"):
        converted(tmp_path / "none.toml")
    with pytest.raises(UserError, match="is no TOML"):
        convert(tmp_path, "a = [")


def test_validation_data_and_one_of_two_weightings_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "val.toml").write_text('[[directory]]\npath = "/pictures/held"\n')
    (tmp_path / "pictures.toml").write_text(
        'resolutions = [512]\nenable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\n'
        '[[directory]]\npath = "/pictures/a"\n'
    )  # fmt: skip
    added = 'eval_datasets = [{name = "v", config = "val.toml"}, "lost.toml"]\n\n[model]\n'
    added += "min_snr_gamma = 5\ndebiased_estimation_loss = true\n"
    path = tmp_path / "main.toml"
    path.write_text(CONFIG.replace("[model]\n", added))
    text = converted(path)
    tables = tomllib.loads(text)
    assert tables["validation"]["source"] == "captions:/pictures/held"
    assert tables["loss"] == {"weighting": "debiased"}
    assert "min_snr_gamma = 5: one weighting" in text and "'lost.toml': there is no such" in text
    assert "min_ar" not in text and "max_ar" not in text
