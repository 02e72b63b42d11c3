"""Runs that give their backbone its own prediction: the same numbers in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.tune.config import Config
from tests.cli.small_unet import EPSILON
from tests.cli.small_unet import TINY as TINY_UNET
from tests.integration.runs import BASE, STEPS, TINY, Run, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_plans import make_plan
from tests.reference import unsealed_record

UNET = [*TINY["unet"], "--pulse-option", "in_channels=2"]
TAKES = ["--pulse-option", "in_channels=2"]
SHARE = 0.88
"""Of the two steps of these runs the second conditions itself."""
FLAGS = [*TAKES, "--pulse-self-conditioning", str(SHARE)]


@pytest.fixture(scope="module")
def expected() -> Run:
    return alone(*STEPS, *FLAGS, backbone="unet")


def test_the_steps_that_are_drawn_differ(expected: Run) -> None:
    rarely = run(1, *STEPS, *TAKES, "--pulse-self-conditioning", "0.5", backbone="unet")
    assert rarely.losses[0] == expected.losses[0] and rarely.losses[1] != expected.losses[1]


def test_a_fold_goes_on_in_the_middle_and_is_sampled(
    expected: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    save = ["--save", str(kept), "--save-interval", "1"]
    given = [*STEPS, *FLAGS, *pipeline(2), *save]
    first = run(2, *given, "--exit-interval", "1", backbone="unet")
    again = run(2, *given, backbone="unet")
    joined = replace(
        again, losses=first.losses + again.losses, grad_norms=first.grad_norms + again.grad_norms
    )
    assert_same(joined, expected)

    (fault,) = refuse(monkeypatch, 1, [*STEPS, *save], [*UNET, *BASE])
    assert "it takes samples of (2, 8, 8) but predicts (1, 8, 8)" in fault
    assert "give --pulse-self-conditioning P" in fault

    picture = tmp_path / "digits.png"
    draw = ["sample", "--load", str(kept), "--steps", "2", "--per-class", "1", "-o", str(picture)]
    assert main(draw) == 0 and picture.exists()


def test_weights_from_and_to_diffusers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Diffusers has such modules, but no setting for the meaning of the extra channels."""
    from diffusers import UNet2DConditionModel

    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    config = TINY_UNET | {"in_channels": 8, "out_channels": 4, "sample_size": 4}
    UNet2DConditionModel(**config).save_pretrained(theirs)
    given = ["import", "--from", str(theirs), "--to", str(ours), *EPSILON]
    assert main(given) == 0
    assert main(["export", "--load", str(ours), "--raw", "--to", str(back)]) == 0
    assert "its pipelines do not feed predictions back" in capsys.readouterr().out
    draw = ["sample", "--load", str(ours), "--raw", "-o", str(tmp_path / "none.png")]
    assert main([*draw, "--classes", "0"]) == 2
    assert "was not trained with --pulse-self-conditioning" in capsys.readouterr().err


def test_a_sequence_sends_predictions_and_a_plan_says_how_often(
    expected: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = dict(flag.split("=") for flag in UNET if "=" in flag)
    config = Config(4, 1, 1, 2, ROW, split=True)
    plan = make_plan(tmp_path / "plan.json", config, "unet-tiny", options, share=SHARE)
    assert main(["show", str(plan)]) == 0
    assert (
        "all forwards once more in 88 % of the steps, for self-conditioning"
        in capsys.readouterr().out
    )
    record = unsealed_record(plan)
    record["self_conditioning"] = 0.5
    (tmp_path / "edited.json").write_text(json.dumps(record))
    assert main(["check", str(tmp_path / "edited.json")]) == 2
    assert "predicted.first_pass_s is" in capsys.readouterr().err
    got = run(4, "--pulse-plan", str(plan), *STEPS[2:], backbone="none")
    assert got.executed.operations == {"F", "I", "W"}
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--pulse-self-conditioning 0.5: it takes samples of (1, 8, 8) but predicts (1, 8, 8)"),
        ([*TAKES, "--pulse-self-conditioning", "0"], "is 0; it must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be(flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [*TINY["unet"], *BASE, *STEPS, "--pulse-self-conditioning", "0.5"]
    (fault,) = refuse(monkeypatch, 1, flags, good)
    assert said in fault
