"""Editing by commands: latents with references, and the pictures of diffusers' pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.encoders.autoencoder import Autoencoder
from tests.cli.test_prompts import FAMILIES, draw, drawn, expected  # noqa: F401

KONTEXT = replace(
    FAMILIES["flux"],
    pipeline=diffusers.FluxKontextPipeline,
    options=(*FAMILIES["flux"].options, "reference=1"),
)


def picture(path: Path, seed: int, size: int = 8) -> Path:
    pixels = torch.randint(256, (size, size, 3), generator=torch.Generator().manual_seed(seed))
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels.byte().numpy()).save(path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    KONTEXT.write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "checkpoint")]) == 0
    return tmp_path / "checkpoint"


def test_a_picture_is_edited_as_by_the_pipeline(
    drawn: list[torch.Tensor],  # noqa: F811
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    first, second = (picture(tmp_path / f"{i}.png", i, KONTEXT.side) for i in range(2))
    draw(KONTEXT, tmp_path, checkpoint, "--image", str(first))
    pipeline = KONTEXT.pipeline.from_pretrained(
        tmp_path, image_encoder=None, feature_extractor=None
    )
    image = [Image.open(first)] * 2
    theirs = expected(KONTEXT, pipeline, image=image, _auto_resize=False, max_area=64)
    torch.testing.assert_close(drawn[0] / 2 + 0.5, theirs, rtol=0, atol=3e-6)
    draw(KONTEXT, tmp_path, checkpoint, "--image", str(second))
    assert (drawn[1] - drawn[0]).abs().max() > 1e-3


def test_a_reference_that_is_missing_or_of_no_use_is_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "sample", "--load", str(checkpoint), "--raw", "--prompt", "a cat", "--encoders",
        str(tmp_path), "--guidance", "1", "-o", str(tmp_path / "cat.png"),
    ]  # fmt: skip
    sizes = [w for option in KONTEXT.options for w in ("--option", option)]
    assert main([*asked, *sizes]) == 2
    assert "also reads reference_image. Give --image, or --from-data" in capsys.readouterr().err
    plain, seen = sizes[:-2], str(picture(tmp_path / "0.png", 0))
    assert main([*asked, *plain, "--image", seen]) == 2
    assert "takes no --image alone" in capsys.readouterr().err
    assert main([*asked, *plain, "--option", "reference=2", "--image", seen]) == 2
    assert "reference: must be 0 or 1, is 2" in capsys.readouterr().err
    assert not (tmp_path / "cat.png").exists()


def test_latents_hold_the_reference_picture(tmp_path: Path) -> None:
    KONTEXT.write(tmp_path)
    for i in range(3):
        picture(tmp_path / "photos" / f"{i}.png", i)
        picture(tmp_path / "photos.reference" / f"{i}.png", 10 + i)
        (tmp_path / "photos" / f"{i}.txt").write_text("a cat")
    sizes = ["in_channels=4", "joint_attention_dim=12", "pooled_projection_dim=8"]
    sizes += [*KONTEXT.options, "guidance_embeds=false"]
    argv = [
        "data", "write-latents", "--from", f"captions:{tmp_path / 'photos'}", "--image-size", "8",
        "--encoders", str(tmp_path), "--backbone", "flux-tiny", "--dtype", "fp32",
        *[w for s in sizes for w in ("--option", s)],
    ]  # fmt: skip
    assert main([*argv, "-o", str(tmp_path / "latents")]) == 0
    written, vae = LatentFolder(tmp_path / "latents"), Autoencoder(tmp_path / "vae")
    assert written.made_by["reference_image"] == written.made_by["latent"] == vae.made_by()
    for i in range(3):
        pixels = torch.from_numpy(_pixels(tmp_path / "photos.reference" / f"{i}.png"))
        (latent,) = vae.encode((pixels.permute(2, 0, 1) / 127.5 - 1)[None])
        found = written.conditioning(i)["reference_image"]
        torch.testing.assert_close(found, latent, rtol=0, atol=1e-6)


def _pixels(path: Path) -> object:
    import numpy as np

    return np.asarray(Image.open(path)).astype(np.float32)
