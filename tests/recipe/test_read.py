"""Recipe files: every key is checked and becomes its flag; faults are listed together."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_pulse.dataclass_flags import RENAMED, flag_value
from megatron_pulse.errors import UserError
from megatron_pulse.integration.flags.parse import Parser, parse
from megatron_pulse.recipe.examples import example_names, example_text
from megatron_pulse.recipe.flags import is_auto, keys_by_flag, training_flags
from megatron_pulse.recipe.keys import TABLES
from megatron_pulse.recipe.read import read_recipe, to_toml

LEAST = """
output = "runs/a"
model.backbone = "uvit-tiny"
data.source = "digits8"
training = { steps = 10, batch_size = 8 }
optimizer.lr = 1e-4
"""
VALUES = {
    "adapter.type": "lora",
    "optimizer.betas": [0.8, 0.9],
    "model.options": {"depth": 4, "skips": True},
    "quantization.type": "nf4",
    "data.workers": 2,
    "data.buckets": "512x768,768x512",
    "data.crop": "random",
    "data.clip_start": "middle",
    "data.frame_noise": "0.05,0.5",
    "training.dtype": "bf16",
    "encoders.schedule": ["vae=fill"],
    "encoders.dtype": "bf16",
    "process.flow_shift": "dynamic",
    "process.objective": "v",
    "process.noise_schedule": "cosine",
    "process.timestep_density": "uniform",
    "process.self_conditioning": 0.5,
    "optimizer.type": "sgd",
    "loss.type": "huber",
    "loss.weighting": "p2",
    "optimizer.schedule": "cosine",
    "training.dropout": 0.2,
    "training.encoder_dropout": {"text_encoder_2": 0.5},
    "training.ema_decay": 0.9,
    "parallel.placement": "fold",
    "parallel.fsdp_gather": "step",
    "parallel.fsdp_reduce": "step",
    "parallel.schedule": "1f1b",
    "parallel.conditioning": "send",
    "parallel.partition": "soft",
    "parallel.solver": "none",
    "parallel.straggler_threshold": 2.0,
    "log.trace_steps": "2-3",
    "samples.flow_grid": "scheduler",
    "samples.classes": "0-3",
}
"""Valid values of keys that take no text or number at will."""
INSTEAD = {"model.module": 'model.backbone = "uvit-tiny"', "training.epochs": "steps = 10, "}
"""Part of ``LEAST`` that a key excludes."""


def written(tmp_path: Path, text: str = LEAST) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def keys() -> list[str]:
    return [f"{table}.{each.name}" for table, kind in TABLES.items() for each in fields(kind)]


def flags_of(tmp_path: Path, *overrides: str, text: str = LEAST) -> list[str]:
    words, faults = training_flags(read_recipe(written(tmp_path, text), overrides).recipe)
    assert faults == []
    return words


@pytest.mark.parametrize("key", keys())
def test_misspelt_key_is_refused_with_its_name(tmp_path: Path, key: str):
    table, _, name = key.partition(".")
    with pytest.raises(UserError, match=rf"{key[:-1]}q is unknown; did you mean .*\b{name}\b"):
        read_recipe(written(tmp_path), [f"{table}.{name[:-1]}q=1"])


@pytest.mark.parametrize("key", keys())
def test_key_becomes_its_flag(tmp_path: Path, key: str):
    """Megatron's parser reads the value of the recipe, for every key with a flag."""
    table, _, name = key.partition(".")
    field = next(each for each in fields(TABLES[table]) if each.name == name)
    flags = field.metadata["flag"].split()
    if not flags:
        return
    text = LEAST.replace(INSTEAD.get(key, "\0"), "")
    value = VALUES.get(key)
    if value is None:
        for value in (True, 3, 0.5, "text", ["text"]):
            try:
                read_recipe(written(tmp_path, text), [f"{key}={to_text(value)}"])
                break
            except UserError:
                continue
    words = flags_of(tmp_path, f"{key}={to_text(value)}", text=text)
    line = parse(words)
    assert not [fault for fault in line.faults if not fault.startswith("hf:")]
    values = value if len(flags) > 1 else [value]
    for flag, one in zip(flags, values, strict=True):
        action = Parser()._option_string_actions[flag]
        read = getattr(line.args, action.dest)
        if isinstance(one, dict):
            assert read == [f"{name}={flag_value(given)}" for name, given in one.items()]
        elif isinstance(read, tuple):
            assert read == tuple(map(float, re.split("[-,]", one)))
        elif isinstance(read, list):
            assert read == (one if isinstance(one, list) else [one])
        else:
            assert read == (str(one) if isinstance(read, str) else one)


def to_text(value: object) -> str:
    return (
        to_toml({"v": value}).partition("=")[2].strip().replace("\n", "")
        if not isinstance(value, dict)
        else "{" + ", ".join(f"{k} = {to_text(v)}" for k, v in value.items()) + "}"
    )


def test_every_flag_of_ours_has_a_key():
    ours = {
        action.option_strings[0]
        for action in Parser()._actions
        if action.option_strings[0].startswith("--pulse-")
    }
    assert ours - set(keys_by_flag()) - set(RENAMED) == {"--pulse-no-progress"}  # log.progress


@pytest.mark.parametrize("name", example_names())
def test_example_makes_flags_without_faults(tmp_path: Path, name: str):
    """The examples' flags are accepted as far as they can be without their files."""
    recipe = read_recipe(written(tmp_path, example_text(name))).recipe
    line = parse(training_flags(recipe)[0])
    assert [fault for fault in line.faults if "hf:" not in fault] == []
    assert is_auto(recipe) == (name not in ("digits", "wan22-a14b-lora"))


def test_faults_are_listed_together(tmp_path: Path):
    text = (
        "model.backbone = 3\nlr = 1\n[data]\n[training]\nbatch_size = 0\n[optimizer]\nbetas = [1]"
    )
    with pytest.raises(UserError) as refused:
        read_recipe(written(tmp_path, text), ["word", "output.x=1", "optimizer.lr=fast"])
    told = str(refused.value)
    for part in (
        "word: write it as TABLE.KEY=VALUE",
        "output is {'x': 1}; allowed is text",
        "model.backbone is 3; allowed is text",
        "lr is unknown; did you mean optimizer.lr?",
        "data.source is missing",
        "training.batch_size is 0; allowed is a whole number, 1 or more",
        "optimizer.betas is [1]",
        "optimizer.lr is 'fast'; allowed is a number above 0",
    ):
        assert part in told
    assert "null" not in told


@pytest.mark.parametrize(
    "override, fault",
    [
        ("model.controlnet=new", "is for weights of a diffusers folder"),
        ("model.null_class=true", "is for weights of a diffusers folder"),
        ('data.sources=[{path = "folder:a"}]', "exclude each other"),
    ],
)
def test_contradicting_keys_are_refused(tmp_path: Path, override: str, fault: str):
    with pytest.raises(UserError, match=fault):
        read_recipe(written(tmp_path), [override])


def test_recipe_without_a_model_is_refused(tmp_path: Path):
    text = LEAST.replace('model.backbone = "uvit-tiny"', "model = {}")
    with pytest.raises(UserError, match="names nothing to train"):
        read_recipe(written(tmp_path, text))


@pytest.mark.parametrize(
    "text, fault",
    [("a = [", "is no TOML"), ("a = 1\na = 2", "is no TOML"), ("\x00", "is no TOML")],
)
def test_unreadable_recipe_is_refused(tmp_path: Path, text: str, fault: str):
    with pytest.raises(UserError, match=fault):
        read_recipe(written(tmp_path, text))


def test_missing_recipe_is_refused_with_a_way_to_make_one(tmp_path: Path):
    with pytest.raises(UserError, match="pulse recipe NAME > .*none.toml"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(UserError, match="is a folder"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    "megatron, fault",
    [
        ("log-params-nrm=true", "is no flag of Megatron; did you mean log-params-norm"),
        ("lr=1", "has a key of its own: optimizer.lr"),
        ("bf16=true", "has a key of its own: training.dtype"),
        ("log_params_norm=false", "is false: leave it out"),
    ],
)
def test_flags_of_megatron_are_checked(tmp_path: Path, megatron: str, fault: str):
    recipe = read_recipe(written(tmp_path), [f"megatron.{megatron}"]).recipe
    (told,) = training_flags(recipe)[1]
    assert fault in told


def test_flags_of_megatron_take_values_lists_and_either_spelling(tmp_path: Path):
    overrides = ["megatron.log_params_norm=true", "megatron.profile-ranks=[0, 1]"]
    words = flags_of(tmp_path, *overrides, "megatron.exit_interval=5")
    assert words[-6:] == [
        *("--log-params-norm", "--profile-ranks", "0", "1"),
        *("--exit-interval", "5"),
    ]


def test_written_recipe_is_read_as_it_was(tmp_path: Path):
    file = read_recipe(written(tmp_path, example_text("digits")), ["model.options.depth=8"])
    assert tomllib.loads(to_toml(file.tables, "a heading\nof two lines")) == file.tables
    assert file.tables["model"]["options"]["depth"] == 8


def test_recomputation_of_all_layers_is_megatrons_flag(tmp_path: Path):
    assert "--recompute-granularity" in flags_of(tmp_path, "parallel.recompute=full")
    patterns = flags_of(tmp_path, 'parallel.recompute=["blocks.*"]')
    assert patterns[patterns.index("--pulse-recompute") + 1] == "blocks.*"


def test_faults_of_an_adapter_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(LEAST)
    with pytest.raises(UserError) as refused:
        read_recipe(path, ["adapter.type=loha", "adapter.dropout=1.0", "adapter.targets=[]"])
    assert str(refused.value).splitlines()[1:] == [
        "  - adapter.type is 'loha'; allowed is one of lora, dora, lokr",
        "  - adapter.targets is []; allowed is a list, not empty, each text",
        "  - adapter.dropout is 1.0; allowed is a number from 0, below 1",
    ]
