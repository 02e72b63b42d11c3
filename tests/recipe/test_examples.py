"""Recipes to begin with, and the table of devices that they need."""

from __future__ import annotations

import re

import pytest

from megatron_pulse.cli import recipe_devices
from megatron_pulse.cli.main import main
from megatron_pulse.recipe.examples import example_backbone, example_names
from model_specs import available


def test_recipes_with_published_weights_name_backbones_that_exist() -> None:
    found = {name: example_backbone(name) for name in example_names()}
    assert {name for name, backbone in found.items() if backbone is None} == {"diffusers", "module"}
    assert {backbone for backbone in found.values() if backbone} <= available().keys()


def test_fewest_devices_fit_and_half_of_them_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe_devices, "_SECONDS", 1.0)
    assert main(["recipe", "dit", "--devices", "rtx-4090"]) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert "rtx-4090 (21.6 usable GB)" in title
    count, memory = re.search(r"dit +750 M +(\d+): ([\d.]+) GB, [\d.]+ samples/s", row).groups()  # type: ignore[union-attr]
    assert int(count) in (1, 2) and 0 < float(memory) < 21.6


def test_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--devices", "rtx-4090,nowhere"]) == 2
    assert "no cluster is called 'nowhere'" in capsys.readouterr().err
    assert main(["recipe", "digit", "--devices", "cpu"]) == 2
    assert "no recipe is called 'digit'" in capsys.readouterr().err
    assert main(["recipe", "digits", "--keys"]) == 2
    assert "digits: --keys" in capsys.readouterr().err
