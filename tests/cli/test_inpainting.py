"""Inpainting by commands: latents with masked pictures, and the pictures of diffusers' pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.images.inpainting import random_mask
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.encoders.autoencoder import Autoencoder
from tests.cli.test_prompts import FAMILIES, draw, drawn, expected  # noqa: F401
from tests.encoders.pipelines import LENGTH

FILL = replace(
    FAMILIES["sd"],
    pipeline=diffusers.StableDiffusionInpaintPipeline,
    settings={**FAMILIES["sd"].settings, "in_channels": 9},
)


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    """A picture and its mask, in the pixels of the pipeline."""
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.byte().numpy()).save(tmp_path / "picture.png")
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    mask[2:7, 1:5] = 255
    Image.fromarray(mask.numpy()).save(tmp_path / "mask.png")
    return [str(tmp_path / "picture.png"), str(tmp_path / "mask.png")]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    FILL.write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "checkpoint")]) == 0
    return tmp_path / "checkpoint"


def test_a_picture_is_that_of_the_pipeline(
    drawn: list[torch.Tensor],  # noqa: F811
    checkpoint: Path,
    pictures: list[str],
    tmp_path: Path,
) -> None:
    picture, mask = pictures
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_diffusers_version": "0.38.0"}))
    draw(FILL, tmp_path, checkpoint, "--image", picture, "--mask", mask)
    pipeline: Any = FILL.pipeline.from_pretrained(
        tmp_path, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    image, grey = Image.open(picture), Image.open(mask)
    kept = pipeline.image_processor.preprocess(image) * (
        pipeline.mask_processor.preprocess(grey) < 0.5
    )
    latent = Autoencoder(tmp_path / "vae").encode(kept)  # the pipeline draws a sample
    theirs = expected(
        FILL, pipeline, image=[image] * 2, mask_image=[grey] * 2,
        masked_image_latents=latent.repeat(2, 1, 1, 1),
    )  # fmt: skip
    torch.testing.assert_close(drawn[0] / 2 + 0.5, theirs, rtol=0, atol=1e-6)
    draw(FILL, tmp_path, checkpoint, "--image", picture, "--mask", picture)
    assert (drawn[1] - drawn[0]).abs().max() > 1e-3


def test_what_is_given_by_halves_is_refused(
    checkpoint: Path, pictures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "sample", "--load", str(checkpoint), "--raw", "--prompt", "a cat", "--encoders",
        str(tmp_path), "--option", f"context_length={LENGTH}", "-o", str(tmp_path / "cat.png"),
    ]  # fmt: skip
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "also reads inpaint_mask, masked_image. Give --image and --mask, or --from-data" in said
    assert main([*asked, "--image", pictures[0]]) == 2
    assert "to inpaint needs --mask" in capsys.readouterr().err
    assert main([*asked, "--image", pictures[0], "--mask", str(tmp_path / "model_index.json")]) == 2
    assert "model_index.json: not an image" in capsys.readouterr().err
    Image.new("L", (8, 4)).save(tmp_path / "wide.png")
    assert main([*asked, "--image", pictures[0], "--mask", str(tmp_path / "wide.png")]) == 2
    said = capsys.readouterr().err
    assert "wide.png: it has 8x4 pixels, and its picture" in said and "proportions differ" in said


@pytest.mark.parametrize("place", ["random", "masks"])
def test_latents_hold_mask_and_masked_picture(place: str, tmp_path: Path) -> None:
    FILL.write(tmp_path)
    photos, masks = tmp_path / "photos", tmp_path / "masks"
    for folder in (photos, masks):
        folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        pixels = torch.randint(256, (8, 8, 3), generator=generator).byte()
        Image.fromarray(pixels.numpy()).save(photos / f"{i}.png")
        (photos / f"{i}.txt").write_text("a cat")
        mask = 255 * random_mask(9, i, (8, 8))[0].byte()
        Image.fromarray(mask.numpy()).save(masks / f"{i}.png")
    flags = [] if place == "random" else ["--inpaint-masks", str(masks)]
    sizes = [f"sample_size={FILL.latents[1]}", "in_channels=9", "cross_attention_dim=8"]
    sizes += [f"context_length={LENGTH}", "block_out_channels=8,16", "transformer_depth=0,1"]
    sizes += ["norm_num_groups=4"]
    assert main([
        "data", "write-latents", "--from", f"captions:{photos}", "--image-size", "8", "--encoders",
        str(tmp_path), "--backbone", "sd-tiny", *[w for s in sizes for w in ("--option", s)],
        "--dtype", "fp32", *flags, "-o", str(tmp_path / "latents"),
    ]) == 0  # fmt: skip
    written, vae = LatentFolder(tmp_path / "latents"), Autoencoder(tmp_path / "vae")
    assert written.made_by["masked_image"] == vae.made_by()
    for i in range(3):
        mask = random_mask(0 if place == "random" else 9, i, (8, 8))
        image = torch.from_numpy(_pixels(photos / f"{i}.png")).permute(2, 0, 1) / 127.5 - 1
        fields = written.conditioning(i)
        assert torch.equal(fields["inpaint_mask"], mask[:, ::2, ::2])
        (masked,) = vae.encode((image * (1 - mask))[None])
        torch.testing.assert_close(fields["masked_image"], masked, rtol=0, atol=1e-6)


def test_masks_that_nothing_reads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "write-latents", "--from", "digits8", "-o", str(tmp_path / "latents")]
    assert main([*words, "--inpaint-masks", "random"]) == 2
    assert "--inpaint-masks random: give the --backbone that inpaints" in capsys.readouterr().err


def _pixels(path: Path) -> Any:
    import numpy as np

    return np.asarray(Image.open(path)).astype(np.float32)


def test_weights_come_back_as_the_pipeline_s(checkpoint: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    assert main(["export", "--load", str(checkpoint), "--raw", "--to", str(back)]) == 0
    ours, theirs = (
        diffusers.UNet2DConditionModel.from_pretrained(folder)
        for folder in (back, tmp_path / "unet")
    )
    assert "pipeline_tag: image-to-image" in (back / "README.md").read_text()
    assert ours.config.in_channels == 9 and ours.config.out_channels == 4
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
