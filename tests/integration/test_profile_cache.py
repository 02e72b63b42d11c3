"""Cache of measured profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_pulse.integration.planning.profile_cache import cached_profile
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import PRESETS, Roofline
from model_specs import load_backbone

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


def profiled(name: str, counted: list[str], settings: tuple[object, ...] = ("float32",)) -> Profile:
    backbone = load_backbone(name)

    def measure() -> Profile:
        counted.append(name)
        return analyse(backbone, [1], Roofline(PRESETS["H100"], "float32"))

    return cached_profile(backbone, CPU, settings, measure)[0]


def test_same_backbone_and_settings_are_measured_once() -> None:
    counted: list[str] = []
    first = profiled("dit-tiny", counted)
    assert profiled("dit-tiny", counted) == first and counted == ["dit-tiny"]
    profiled("dit-tiny", counted, ("float32", (1, 4)))
    profiled("uvit-tiny", counted)
    assert counted == ["dit-tiny", "dit-tiny", "uvit-tiny"]


def test_damaged_file_is_measured_again(folder: Path) -> None:
    counted: list[str] = []
    first = profiled("dit-tiny", counted)
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:-40])
    assert profiled("dit-tiny", counted) == first and len(counted) == 2
    assert profiled("dit-tiny", counted) == first and len(counted) == 2


def test_folder_that_cannot_be_written_is_left_alone(folder: Path) -> None:
    counted: list[str] = []
    folder.write_text("no folder")
    profiled("dit-tiny", counted)
    profiled("dit-tiny", counted)
    assert len(counted) == 2 and folder.read_text() == "no folder"
