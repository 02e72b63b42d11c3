"""Diffusion-DPO in whole runs: pairs of pictures or latents, the same numbers in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_pulse.cli.main import main
from megatron_pulse.integration.loop.forward_backward import IMPLICIT_ACCURACY
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.cli.small_diffusion import make_diffusion
from tests.cli.test_train import train as train_recipe
from tests.integration.runs import BASE, TINY, Run, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.ranks import RanksFailed
from tests.reference import unsealed_record

DPO = ["--pulse-loss", "dpo"]
LORA = ["--pulse-adapter", "lora", "--pulse-adapter-rank", "3"]
STEPS = ["--global-batch-size", "8", "--train-iters", "3", "--pulse-ema-decay", "0.5"]
STEPS += ["--eval-interval", "3", "--lr", "1e-2"]
NUM_PAIRS = 25


def write_pairs(folder: Path, picked: bool = False) -> None:
    """Folder of pairs with one tie; with ``picked`` in the columns of Pick-a-Pic."""
    folder.mkdir()
    lines = []
    for i in range(NUM_PAIRS + 1):
        names = f"{i}a.png", f"{i}b.png"
        for name, shade in zip(names, (9 * i, 255 - 7 * i), strict=True):
            Image.new("RGB", (8, 8), (shade, 100, 5 * i)).save(folder / name)
        text = f"a cat {i % 3}"
        if picked:
            label = 0.5 if i == NUM_PAIRS else i % 2
            first, second = names if label else names[::-1]
            line = {"jpg_0": first, "jpg_1": second, "label_0": label, "text": text}
        else:
            loser = names[0] if i == NUM_PAIRS else names[1]
            line = {"winner": names[0], "loser": loser, "text": text}
        lines.append(json.dumps(line))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    write_pairs(folder / "pairs")
    return folder


def flags(place: Path, *more: str) -> list[str]:
    return [*whole(place), *LORA, "--pulse-adapter-target", "*", *more]


def whole(place: Path, *more: str) -> list[str]:
    """Flags of a run that trains all weights."""
    words = [*TINY["uvit"], *BASE, *STEPS, *DPO]
    return [*words, "--pulse-data", f"pairs:{place / 'pairs'}", *more]


@pytest.fixture(scope="module")
def expected(place: Path) -> Run:
    tensorboard = ["--tensorboard-dir", str(place / "tensorboard")]
    return run(1, *flags(place, *tensorboard), backbone="none")


def test_the_first_loss_is_ln_2_and_the_log_has_the_accuracy(place: Path, expected: Run) -> None:
    assert expected.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected.losses[-1] != expected.losses[0] and all(expected.grad_norms)
    (validation,) = expected.validation
    assert validation != pytest.approx(math.log(2), abs=1e-6)
    events = EventAccumulator(str(place / "tensorboard"))
    events.Reload()
    accuracies = [event.value for event in events.Scalars(IMPLICIT_ACCURACY)]
    assert len(accuracies) == 3 and accuracies[0] == 0.5
    assert set(accuracies[1:]) <= {i / 4 for i in range(5)}


@pytest.mark.parametrize("schedule", ["wave-split", "1f1b"])
def test_a_resumed_pipeline_is_one_uninterrupted_process(
    schedule: str, place: Path, expected: Run, tmp_path: Path
) -> None:
    split = schedule == "wave-split"
    layout = ["--pulse-placement", "fold" if split else "sequential"]
    given = [*flags(place), "--save", str(tmp_path / "run"), "--save-interval", "1"]
    given += pipeline(2, *layout, "--pulse-schedule", schedule, "--recompute-granularity", "full")
    first = run(2, *given, "--exit-interval", "1", backbone="none")
    rest = run(2, *given, backbone="none")
    assert ("I" in rest.executed.operations) == split and rest.executed.recomputed
    rest.losses = first.losses + rest.losses
    rest.grad_norms = first.grad_norms + rest.grad_norms
    assert_same(rest, expected)


@pytest.mark.parametrize(
    "layout",
    [["--micro-batch-size", "4"], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]],
    ids=["dp2", "tp2"],
)
def test_replicas_and_tensors_change_nothing(layout: list[str], place: Path, expected: Run) -> None:
    got = run(2, *flags(place, *layout), backbone="none")
    assert got.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert got.validation == pytest.approx(expected.validation, rel=1e-5)


def test_a_resumed_reference_is_that_of_the_start(place: Path, tmp_path: Path) -> None:
    """All weights in bf16; saved in a fold, then in a pipeline, then on one device."""
    given = whole(place, "--bf16", "--use-distributed-optimizer")
    expected = run(1, *given, backbone="none")
    assert expected.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(expected.losses[-1] - math.log(2)) > 1e-3
    given += ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    layout = ["--pulse-placement", "fold", "--pulse-schedule", "wave-split"]
    first = run(2, *given, *pipeline(2, *layout), "--exit-interval", "1", backbone="none")
    layout = ["--pulse-placement", "sequential", "--recompute-granularity", "full"]
    second = run(2, *given, *pipeline(2, *layout), "--exit-interval", "2", backbone="none")
    rest = run(1, *given, backbone="none")
    rest.losses = first.losses + second.losses + rest.losses
    rest.grad_norms = first.grad_norms + second.grad_norms + rest.grad_norms
    assert_same(rest, expected)


def test_tensors_divide_the_reference(place: Path) -> None:
    got = run(2, *whole(place, "--tensor-model-parallel-size", "2"), backbone="none")
    alone = run(1, *whole(place), backbone="none")
    assert got.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert got.losses == pytest.approx(alone.losses, rel=1e-4)
    assert got.validation == pytest.approx(alone.validation, rel=1e-4)


def test_a_plan_counts_the_pass_of_the_reference(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = str(tmp_path / "plan.json")
    of = ["--backbone", "uvit-tiny", "--adapter", "lora", "--adapter-target", "*"]
    ask = ["tune", *of, "--cluster", "cpu", "--global-batch-size", "2"]
    ask += ["--seconds", "1", "--solver", "none"]
    assert main([*ask, "--dpo", "-o", plan]) == 0
    said = capsys.readouterr().out
    assert "dpo: every step runs all forwards twice" in said and "--pulse-loss dpo" in said
    assert main(["show", plan]) == 0
    assert "all forwards once more in every step" in capsys.readouterr().out
    assert main(["check", plan]) == 0
    assert unsealed_record(Path(plan))["micro_batch_size"] == 2
    assert main([*ask, "--dpo", "--micro-batch-size", "1"]) == 2
    assert "none is even and divides" in capsys.readouterr().err
    with_copy = str(tmp_path / "copied.json")
    assert main(["tune", *of[:2], *ask[7:], "--dpo", "-o", with_copy]) == 0
    assert "of which each stage keeps a copy" in capsys.readouterr().out
    assert main(["show", with_copy]) == 0
    assert "a frozen copy of the trained weights" in capsys.readouterr().out
    assert main(["check", with_copy]) == 0
    assert [load_checked(each).state.reference for each in (plan, with_copy)] == [False, True]
    good = [*BASE[2:], "--train-iters", "2", "--pulse-plan", plan, "--pulse-data", "digits8"]
    faults = refuse(monkeypatch, 2, ["--lr", "1e-3"], good)
    assert any("counts a pass of the reference in every step" in fault for fault in faults)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--micro-batch-size", "1"], "--micro-batch-size 1 is odd"),
        (["--eval-micro-batch-size", "1"], "--eval-micro-batch-size 1 is odd"),
        (["--pulse-self-conditioning", "0.5"], "excludes --pulse-loss dpo: the first pass"),
        (["--pulse-learned-sigma"], "excludes --pulse-loss dpo, which compares"),
        (["--pulse-huber-c", "0.1"], "is for --pulse-loss huber"),
        (["--pulse-data", "digits8"], "its samples are no pairs"),
        (["--pulse-skip-corrupt"], "is for image files: --pulse-data folder:PATH"),
        (["--pulse-loss", "mse"], "its samples are pairs of a winner and a loser"),
    ],
)
def test_what_cannot_be_beside_it(
    given: list[str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = refuse(monkeypatch, 1, given, flags(place))
    assert any(said in fault for fault in faults), faults


def test_beta_is_for_dpo(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [*TINY["uvit"], *BASE, "--global-batch-size", "8", "--train-iters", "2"]
    (fault,) = refuse(monkeypatch, 1, ["--pulse-dpo-beta", "10"], good)
    assert "is for --pulse-loss dpo" in fault


@pytest.fixture(scope="module")
def diffusion(place: Path) -> Path:
    (place / "sd").mkdir()
    return make_diffusion(place / "sd")


def test_stored_pairs_are_those_of_the_loop(place: Path, diffusion: Path) -> None:
    """Pictures of ``winner`` and ``loser`` in the loop, and those of Pick-a-Pic's columns ahead."""
    model = ["--pulse-module", f"diffusers:{diffusion}", "--pulse-option", "height=4"]
    model += ["--pulse-option", "width=4", *BASE, *STEPS, *DPO, *LORA, "--train-iters", "2"]
    loop = ["--pulse-encoders", str(diffusion), "--pulse-data", f"pairs:{place / 'pairs'}"]
    write_pairs(place / "picked", picked=True)
    write = ["data", "write-latents", "--from", f"pairs:{place / 'picked'}", "--image-size", "8"]
    write += ["--encoders", str(diffusion), "--module", f"diffusers:{diffusion}"]
    write += ["--option", "height=4", "--option", "width=4", "--dtype", "fp32"]
    assert main([*write, "-o", str(place / "latents")]) == 0
    stored = ["--pulse-data", f"latents:{place / 'latents'}"]
    runs = [run(1, *model, *data, backbone="none") for data in (loop, stored)]
    assert_same(*runs)
    with pytest.raises(RanksFailed, match="its samples are pairs of a winner and a loser"):
        run(1, *model, *stored, "--pulse-loss", "mse", backbone="none")


def test_a_recipe_trains_pairs(place: Path, diffusion: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "dpo.toml"
    recipe.write_text(
        f"""
        output = "{tmp_path / "run"}"
        model.weights = "{diffusion}"
        model.options = {{ height = 4, width = 4 }}
        encoders.folder = "{diffusion}"
        adapter = {{ type = "lora", rank = 3 }}
        data.source = "pairs:{place / "pairs"}"
        loss = {{ type = "dpo", dpo_beta = 2000.0 }}
        training = {{ steps = 2, batch_size = 4, micro_batch_size = 2 }}
        optimizer.lr = 1e-3
        parallel = {{ pipeline = 2, solver = "none", timeout_s = 60 }}
        validation.batches = 1
        log.every = 1
        """
    )
    said = train_recipe(recipe)
    assert f"1 of {NUM_PAIRS + 1} pairs are ties: left out" in said
    assert "dpo, beta 2000" in said and "loss 0.693147 | implicit accuracy 0.5" in said
    assert "weights: " in said
