"""Encoders in the loop: in front of steps and in their idle time, the same run in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, ROW, WHOLE
from megatron_pulse.planner.tune.config import Config
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_pipeline
from tests.integration.runs import STEPS, TEXT, TINY, assert_same, pipeline, run
from tests.integration.test_plans import make_plan

READS = [
    *TEXT,
    "--pulse-option", "in_channels=2", "--pulse-option", "out_channels=2",
    "--pulse-option", "sample_size=4", "--pulse-option", f"context_length={LENGTH}",
]  # fmt: skip

OPTIONS = dict(flag.split("=") for flag in (*TINY["unet"], *READS) if "=" in flag)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose encoders make what ``READS`` reads."""
    root = make_pipeline(tmp_path_factory.mktemp("sd"), ("clip", 16, 16))
    make_vae(
        root / "vae", in_channels=1, out_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def flags(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = captioned_digits(tmp_path_factory.mktemp("digits"))
    return [
        *STEPS, *READS, "--pulse-data", data, "--pulse-class-dropout", "0.4",
        "--pulse-encoders", str(folder),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def costs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("costs") / "encoders.json"
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    argv = ["profile", "--backbone", "sd-tiny", *options, "--encoders", str(folder)]
    assert main([*argv, "-o", str(file), "--device", "cpu"]) == 0
    return file


def test_in_front_of_every_layout(flags: list[str]) -> None:
    expected = run(1, *flags, backbone="unet")
    assert_same(run(2, *flags, *pipeline(2), backbone="unet"), expected)


@pytest.mark.parametrize(
    "config",
    [
        Config(1, 1, 1, 2, WHOLE),
        Config(2, 1, 1, 2, FOLD_EXACT, split=True),
        Config(2, 1, 1, 2, ROW, recompute=True),
        Config(4, 1, 1, 2, FOLD_SOFT),
    ],
    ids=["one", "split-fold", "recomputed-sequence", "four"],
)
def test_in_idle_time(config: Config, flags: list[str], costs: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan.json", config, "sd-tiny", OPTIONS, costs)
    fillers = json.loads(plan.read_text())["schedule"]["fillers"]
    assert [filler["name"] for filler in fillers] == ["text_encoder", "vae"]
    given = flags[len(STEPS + READS) :]
    obeyed = ["--pulse-plan", str(plan), "--train-iters", "3"]
    got = run(config.pipeline, *given, *obeyed, backbone="none")
    assert "X" in got.executed.operations
    assert_same(got, run(1, *flags, backbone="unet"))
