"""Training on folders of pictures of several shapes, in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.integration.runs import BASE, STEPS, Run, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_buckets import MODULE

RGB = [text.replace("channels=1", "channels=3") for text in MODULE]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pictures that are wide, 14 that are high."""
    folder = tmp_path_factory.mktemp("photos")
    numbers = np.random.default_rng(0)
    for i in range(44):
        width, height = numbers.integers(18, 30), numbers.integers(9, 14)
        size = (height, width, 3) if i < 30 else (width, height, 3)
        Image.fromarray(numbers.integers(0, 255, size, dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def flags(photos: Path, *more: str) -> list[str]:
    return [
        *RGB, "--pulse-data", f"folder:{photos}", "--pulse-resolution", "16",
        "--pulse-buckets", "24x12,12x24,16x16", "--pulse-flip", "0.5", "--pulse-crop", "random",
        "--global-batch-size", "8", "--train-iters", "3", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    save = tmp_path_factory.mktemp("alone")
    kept = ["--save", str(save), "--save-interval", "1"]
    return run(1, *flags(photos, *kept), backbone="none"), save


def test_a_fold_has_the_bits_of_one_process(photos: Path, alone: tuple[Run, Path]) -> None:
    both = run(2, *flags(photos), *pipeline(2), backbone="none")
    assert both.executed.placement == "fold"
    assert_same(both, alone[0])


def test_other_shapes_and_augmentation_are_refused_at_a_resume(
    photos: Path, alone: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = [*BASE, *flags(photos), "--load", str(alone[1])]
    other = [
        "--pulse-flip",
        "0.25",
        "--pulse-buckets",
        "12x24,24x12",
        "--pulse-caption-prefix",
        "a",
    ]
    said = refuse(monkeypatch, 1, [*other, "--micro-batch-size", "2"], again)
    assert len(said) == 3
    assert "of the shapes 12x24,24x12, those of this run 24x12,12x24" in said[0]
    assert "made with --pulse-flip 0.5, those of this run with 0.25" in said[1]
    assert "--pulse-caption-prefix" in said[2]


def test_what_contradicts_shapes_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refuse(monkeypatch, 1, [*flags(photos), *STEPS, "--pulse-option", "buckets=4x8"], BASE)
    assert any("--pulse-option buckets sets the model's shapes" in one for one in said)
    said = refuse(monkeypatch, 1, [*flags(photos), *STEPS, "--pulse-buckets", "4by8"], BASE)
    assert any("no list of WIDTHxHEIGHT in pixels" in one for one in said)
