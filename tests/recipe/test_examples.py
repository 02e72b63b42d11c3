"""Recipes to begin with, and the table of devices that they need."""

from __future__ import annotations

import inspect
import re
import tomllib

import diffusers
import pytest
import torch

from megatron_pulse.cli import recipe_devices
from megatron_pulse.cli.main import main
from megatron_pulse.recipe import examples
from megatron_pulse.recipe.examples import (
    example_backbone,
    example_names,
    example_text,
    example_traced,
)
from model_specs import available
from tests.svd_pipeline import UNET

VIDEO = {"hunyuanvideo-lora": 12.82, "svd": 1.525, "wan21-14b-lora": 14.29, "wan22-5b": 5.0}
"""Billions of parameters of the published weights."""


def test_recipes_with_published_weights_name_backbones_that_exist() -> None:
    found = {name: example_backbone(name) for name in example_names()}
    unnamed = {name for name, backbone in found.items() if backbone is None}
    own = {"diffusers", "module", "wan22-a14b-lora"}
    assert {name for name in unnamed if example_traced(name) is None} == own
    assert {backbone for backbone in found.values() if backbone} <= available().keys()


@pytest.mark.parametrize("name", VIDEO)
def test_video_recipes_have_the_published_sizes(name: str) -> None:
    """Of the class's configuration, and of clips as the comment's command writes them."""
    made = example_traced(name)
    assert made is not None
    module, sizes = made
    text = example_text(name)
    options = {**sizes, **tomllib.loads(text)["model"].get("options", {})}
    class_name = module.removeprefix("diffusers:")
    given = {
        key: [*map(int, v.split(","))] if isinstance(v, str) else v for key, v in sizes.items()
    }
    with torch.device("meta"):
        kind = getattr(diffusers, class_name)
        known = inspect.signature(kind.__init__).parameters
        model = kind(**{key: value for key, value in given.items() if key in known})
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(VIDEO[name], abs=0.005)
    found = re.search(r"--buckets (\d+)x(\d+) --frames (\d+) ", text)
    assert found is not None
    width, height, frames = map(int, found.groups())
    factor, step = {"svd": (8, 1), "wan22-5b": (16, 4)}.get(name, (8, 4))
    latents = options.get("frames", options.get("num_frames"))
    assert (height / factor, width / factor) == (options["height"], options["width"])
    assert latents == (frames - 1) // step + 1


def test_fewest_devices_fit_and_half_of_them_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe_devices, "_SECONDS", 1.0)
    assert main(["recipe", "dit", "--devices", "rtx-4090"]) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert "rtx-4090 (21.6 usable GB)" in title
    count, memory = re.search(r"dit +750 M +(\d+): ([\d.]+) GB, [\d.]+ samples/s", row).groups()  # type: ignore[union-attr]
    assert int(count) in (1, 2) and 0 < float(memory) < 21.6


def test_devices_of_a_traced_class_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = example_traced("svd") or ("", {})
    small = {
        key: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for key, value in UNET.items()
    }
    monkeypatch.setitem(examples._TRACED, "svd", (module, small))  # type: ignore[index]
    monkeypatch.setattr(recipe_devices, "_SECONDS", 1.0)
    assert main(["recipe", "svd", "--devices", "rtx-4090"]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert re.search(r"svd +1 M +1: [\d.]+ GB, [\d.]+ samples/s", row), row


def test_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--devices", "rtx-4090,nowhere"]) == 2
    assert "no cluster is called 'nowhere'" in capsys.readouterr().err
    assert main(["recipe", "digit", "--devices", "cpu"]) == 2
    assert "no recipe is called 'digit'" in capsys.readouterr().err
    assert main(["recipe", "digits", "--keys"]) == 2
    assert "digits: --keys" in capsys.readouterr().err
