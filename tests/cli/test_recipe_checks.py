"""Checks of ``pulse train`` before any rank starts: all faults at once, named by keys."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.dataclass_flags import RECIPE_KEYS
from megatron_pulse.integration.flags.recipe_keys import name_keys_in_output, with_keys
from megatron_pulse.recipe.flags import keys_by_flag
from megatron_pulse.recipe.keys import TABLES
from tests.ranks import RanksFailed, run_ranks, said_once

RECIPE = """
output = "{output}"
model.backbone = "uvit-tiny"
model.options = {{ in_channels = 1, embed_dim = 32, depth = 4 }}
data.source = "digits8"
training = {{ steps = 10, batch_size = 8, micro_batch_size = 2 }}
optimizer.lr = 1e-4
parallel = {{ pipeline = 2, solver = "none" }}
"""
BAD = {
    "model.weights": "'nowhere'",
    "model.backbone": "'uvit-tny'",
    "model.module": "'mine.py:build'",  # beside a backbone
    "model.options": "{depht = 4}",
    "model.train": "'embd.*'",
    "model.freeze": "'embd.*'",
    "quantization.type": "'nf4'",  # without an adapter
    "data.source": "'mnst'",
    "data.default_caption": "'of digits'",
    "data.skip_corrupt": "true",  # of digits
    "data.masks": "'nowhere'",
    "data.bucket_batch": "8",
    "data.workers": "100000",
    "encoders.folder": "'nowhere'",
    "encoders.schedule": "'later'",
    "encoders.dtype": "'bf16'",  # without encoders
    "process.objective": "'epsilom'",
    "process.noise_schedule": "'linear'",  # of flow
    "process.beta_start": "0.1",
    "process.beta_end": "0.1",
    "process.trained_betas": "'nowhere'",
    "process.zero_terminal_snr": "true",
    "process.num_timesteps": "1",
    "process.flow_shift": "'dynamo'",
    "process.timestep_density": "'logitnormal'",
    "process.logit_mean": "nan",
    "process.mode_scale": "1.0",
    "process.min_time": "1.5",
    "process.max_time": "1.5",
    "process.self_conditioning": "1.5",
    "process.replace": "true",
    "loss.type": "'l1'",
    "loss.huber_c": "0.1",
    "loss.dpo_beta": "2000.0",
    "loss.weighting": "'minsnr'",
    "loss.snr_gamma": "5.0",
    "loss.p2_gamma": "1.0",
    "loss.learned_sigma": "true",
    "training.batch_size": "5",
    "training.epochs": "2",  # beside steps
    "training.micro_batch_size": "3",
    "training.dropout": "1.5",
    "training.ema_decay": "1.5",
    "optimizer.type": "'Muon'",
    "optimizer.betas": "[0.9, 1.5]",
    "optimizer.momentum": "1.5",
    "optimizer.schedule": "'cosin'",
    "optimizer.warmup_steps": "10",
    "optimizer.warmup_epochs": "1e30",
    "optimizer.min_lr": "1e-3",
    "optimizer.decay_steps": "5",
    "optimizer.wsd_decay_steps": "5",
    "optimizer.cpu_offload": "true",
    "parallel.devices": "3",
    "parallel.plan": "'nowhere'",
    "parallel.pipeline": "7",
    "parallel.tensor": "3",
    "parallel.placement": "'fould'",
    "parallel.chunks": "3",
    "parallel.schedule": "'nowhere.csv'",
    "parallel.activation_cap": "1",
    "parallel.conditioning": "'sent'",
    "parallel.partition": "'sotf'",
    "parallel.profile": "'nowhere'",
    "parallel.link_us": "1e30",
    "parallel.memory_gb": "1e-6",
    "parallel.recompute": "'blok.*'",
    "parallel.recompute_selective": "'blok.*'",
    "parallel.offload": "'blok.*'",
    "parallel.solver": "'gurobi'",
    "parallel.timeout_s": "0.5",
    "parallel.straggler_threshold": "0.5",
    "validation.source": "'mnst'",
    "validation.times": "3",
    "samples.prompts": "'a digit'",
    "samples.negative_prompt": "'a letter'",
    "samples.classes": "'9-0'",
    "samples.from_data": "5",  # without samples.every
    "samples.count": "5",
    "samples.steps": "5",
    "samples.guidance": "5.0",
    "samples.eta": "1.5",
    "samples.flow_grid": "'evn'",
    "samples.batch_size": "5",
    "samples.encoders": "'nowhere'",
    "samples.vae": "'nowhere'",
    "samples.raw": "true",
    "samples.folder": "'nowhere'",
    "checkpoint.keep_every": "1500",
    "log.trace_steps": "'5-3'",
}
"""Bad values that reach the checks of flags; those of other keys are of a wrong type or sign."""


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *overrides: str) -> str:
    """Error of ``pulse train``, which starts and writes nothing."""
    recipe, output = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(output=output))
    before = dict(os.environ)
    assert main(["train", str(recipe), *overrides]) == 2
    assert not output.exists() and os.environ == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "key", [f"{table}.{each.name}" for table, kind in TABLES.items() for each in fields(kind)]
)
def test_bad_value_is_refused_by_its_key(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = refused(capsys, tmp_path, f"{key}={BAD.get(key, '-1')}")
    assert key in said and "--" not in said


def test_all_faults_are_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = refused(
        capsys, tmp_path, "loss.type=l1", "samples={every = 5, classes = '0-99'}",
        "training.batch_size=5", "optimizer.type=Muon", "model.options.num_classes=2",
        "megatron.no-such=1", "megatron.lr_warmup_fraction=2.0",
    )  # fmt: skip
    for fault in (
        "loss.type: invalid choice: 'l1' (choose from 'mse', 'huber', 'dpo')",
        "samples.classes: the model has classes 0-1, not 2, 3, 4, 5, 6, ...",
        "training.batch_size 5 is not a positive multiple of training.micro_batch_size 2 x 1 "
        "data-parallel replicas = 2. Give 4 or 6",
        "optimizer.type Muon: did you mean muon?",
        "use model.options.num_classes=10",
        "megatron.no-such is no flag of Megatron",
        "megatron.lr-warmup-fraction is 2",
    ):
        assert said.count(fault) == 1, said


def test_preferences_need_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = refused(capsys, tmp_path, "loss.type=dpo", "training.micro_batch_size=1")
    for fault in (
        "training.micro_batch_size 1 is odd, and loss.type dpo counts the samples of pairs",
        "digits8: its samples are no pairs",
    ):
        assert said.count(fault) == 1, said


def test_weights_are_not_imported_before_the_flags_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "weights").mkdir()
    weights = f"model={{weights = '{tmp_path / 'weights'}'}}"
    said = refused(capsys, tmp_path, weights, "loss.type=l1", "data.source=mnst")
    assert "(2 faults)" in said and "loss.type" in said and "data.source" in said


@pytest.mark.parametrize(
    "text, named",
    [
        ("--lr-warmup-iters 9: --train-iters", "optimizer.warmup_steps 9: training.steps"),
        ("use --pulse-option num_classes=3", "use model.options.num_classes=3"),
        ("--pulse-encoder-schedule vae=fill", "encoders.schedule vae=fill"),
        ("--train-samples 5", "megatron.train-samples 5"),
        ("--no-such 1, a/--lr, runs--lr", "--no-such 1, a/--lr, runs--lr"),
        ("'pulse profile --lr 1', then --lr 2", "'pulse profile --lr 1', then optimizer.lr 2"),
        ("command: a.py --lr 1", "command: a.py --lr 1"),
        ("export:  pulse export --load a --lr 1", "export:  pulse export --load a --lr 1"),
    ],
)
def test_flags_are_named_by_keys(text: str, named: str):
    assert with_keys(text, keys_by_flag()) == named


def test_output_of_ranks_names_keys(monkeypatch: pytest.MonkeyPatch):
    out, error = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.delenv(RECIPE_KEYS, raising=False)
    name_keys_in_output()
    print("--lr")
    monkeypatch.setenv(RECIPE_KEYS, json.dumps(keys_by_flag()))
    name_keys_in_output()
    print("--lr")
    print("warning: --seed", file=sys.stderr)
    assert out.getvalue() == "--lr\noptimizer.lr\n"
    assert error.getvalue() == "warning: training.seed\n"


def _train(words: list[str]) -> None:
    """As in a process that torchrun or srun starts."""
    main(["train", *words])


@pytest.mark.parametrize("override", ["loss.typ=mse", "loss.type=l1"])
def test_launched_ranks_refuse_once(override: str, tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(output=tmp_path / "run"))
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _train, [str(recipe), override])
    assert said_once(failed.value, override.partition("=")[0])
    assert failed.value.exit_codes == [2, 2]
