"""Runs with a reference picture beside each sample, in every layout."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.images.digits import load_digits
from tests.data.captioned import captioned_digits
from tests.integration.runs import STEPS, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_context_parallel import assert_close

OPTIONS = ["in_channels=1", "sample_size=8", "reference=1", "num_layers=1"]
FLUX = ["--pulse-backbone", "flux-tiny", "--pulse-objective", "flow"]
FLUX += [w for option in OPTIONS for w in ("--pulse-option", option)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on digits, each of which has its mirror image as a reference."""
    root = tmp_path_factory.mktemp("edits")
    name = captioned_digits(root)
    images, _ = load_digits("digits8")
    (root / "captions.reference").mkdir()
    for i in range(40):
        pixels = ((images[i].squeeze()[:, ::-1] + 1) * 127.5).astype("uint8")
        Image.fromarray(pixels).save(root / "captions.reference" / f"{i}.png")
    return [*FLUX, *STEPS, "--pulse-data", name, "--pulse-conditioning", "send"]


def test_pipelines_and_ranks_that_share_tokens_train_as_one_process(
    flags: list[str], tmp_path: Path
) -> None:
    save = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    expected = alone(*flags, backbone="none")
    assert_same(run(2, *flags, *pipeline(2), *save, backbone="none"), expected)
    divided = run(2, *flags, "--context-parallel-size", "2", backbone="none")
    assert_close(divided, expected)
    draw = ["sample", "--load", str(tmp_path / "kept"), "--raw", "--steps", "2", "--per-class", "1"]
    assert main([*draw, "--from-data", "2", "-o", str(tmp_path / "held-out.png")]) == 0
    seen = str(flags[flags.index("--pulse-data") + 1].partition(":")[2]) + ".reference/3.png"
    prompt = ["--prompt", "a dark digit one", "--image", seen]
    assert main([*draw, *prompt, "-o", str(tmp_path / "edited.png")]) == 0
    back = tmp_path / "back"
    assert main(["export", "--load", str(tmp_path / "kept"), "--raw", "--to", str(back)]) == 0
    assert "pipeline_tag: image-to-image" in (back / "README.md").read_text()
    model = diffusers.FluxTransformer2DModel.from_pretrained(back)
    weight = model.x_embedder.weight
    assert torch.equal(weight, torch.as_tensor(expected.weights["x_embedder.linear.weight"]))


def test_pictures_without_a_reference_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = captioned_digits(tmp_path)
    flags = [*FLUX, *STEPS, "--pulse-data", name]
    faults = refuse(monkeypatch, 1, [], flags)
    assert any("there is no folder" in each and "captions.reference" in each for each in faults)
