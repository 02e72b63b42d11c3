"""Pictures become what diffusers' pipelines give their autoencoders and make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.torch import load_file, save_file

from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.images.conditioning import control_picture
from megatron_pulse.data.images.pictures import decoded, fitted
from megatron_pulse.encoders.autoencoder import Autoencoder, AutoencoderError
from tests.cli.test_data import make_vae

PER_CHANNEL = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 0.7]}


def picture(side: int = 16) -> Image.Image:
    """Every value of a byte."""
    pixels = np.random.default_rng(0).permutation(np.arange(side * side * 3) % 256)
    return Image.fromarray(pixels.reshape(side, side, 3).astype(np.uint8))


def test_pixels_have_the_bits_of_the_image_processor(tmp_path: Path) -> None:
    image = picture()
    image.save(tmp_path / "a.png")
    plain = VaeImageProcessor(vae_scale_factor=8)
    assert torch.equal(fitted(decoded(image, 3), (16, 16)), plain.preprocess(image)[0])
    control = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)
    seen = control_picture(tmp_path / "a.png", FieldSpec((3, 16, 16)))
    assert torch.equal(seen, control.preprocess(image)[0])


def vae_at(folder: Path, **settings: Any) -> Any:
    return make_vae(
        folder, latent_channels=4, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        **settings,
    ).eval()  # fmt: skip


def sdxl(vae: Any, image: torch.Tensor, generator: torch.Generator) -> Any:
    pipeline = diffusers.StableDiffusionXLImg2ImgPipeline(
        vae, None, None, None, None, None, None, add_watermarker=False
    )
    return pipeline.prepare_latents(
        image, None, 1, 1, torch.float32, torch.device("cpu"), generator, add_noise=False
    )


def flux(vae: Any, image: torch.Tensor, generator: torch.Generator) -> Any:
    pipeline = diffusers.FluxImg2ImgPipeline(None, vae, None, None, None, None, None)
    return pipeline._encode_vae_image(image, generator)


@pytest.mark.parametrize(
    ("pipeline", "settings"),
    [
        (sdxl, {"scaling_factor": 0.13025}),
        (sdxl, {"scaling_factor": 0.5, **PER_CHANNEL}),
        (flux, {"scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False}),
    ],
)
@torch.no_grad()
def test_latents_are_the_pipelines_samples(pipeline: Any, settings: Any, tmp_path: Path) -> None:
    vae = vae_at(tmp_path, **settings)
    pixels = fitted(decoded(picture(), 3), (16, 16))[None]
    ours = Autoencoder(tmp_path)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    theirs = pipeline(vae, pixels, torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours.encode(pixels, noise), theirs, rtol=1e-6, atol=1e-6)
    back = diffusers.AutoencoderKL.from_pretrained(tmp_path).decode
    plain = theirs / ours.scale + ours.shift
    torch.testing.assert_close(ours.decode(theirs), back(plain).sample.clamp(-1, 1))


@torch.no_grad()
def test_an_autoencoder_runs_in_fp16_only_where_it_may(tmp_path: Path) -> None:
    pixels = fitted(decoded(picture(), 3), (16, 16))[None]
    for force, dtype in ((True, torch.float32), (False, torch.float16)):
        folder = tmp_path / str(force)
        vae_at(folder, force_upcast=force)
        path = folder / "diffusion_pytorch_model.safetensors"
        weights = load_file(path)
        weights["encoder.down_blocks.0.resnets.0.conv2.weight"] *= 3e5
        save_file(weights, path, {"format": "pt"})
        ours = Autoencoder(folder, torch.float16)
        assert ours.dtype == Autoencoder(folder, torch.float16, weighs=False).dtype == dtype
        assert ("runs in fp32" in ours.remark) == force
        if force:
            assert torch.equal(ours.encode(pixels), Autoencoder(folder).encode(pixels))
            continue
        with pytest.raises(
            AutoencoderError, match="in float16, returns values that are not finite"
        ):
            ours.encode(pixels)
        weights["decoder.conv_out.weight"] *= 3e38
        save_file(weights, path, {"format": "pt"})
        for asked, why in (
            (torch.float16, "sets force_upcast to false"),
            (torch.float32, "damaged"),
        ):
            decoder = rf"the decoder of autoencoder {folder}, in {asked}".replace("torch.", "")
            with pytest.raises(AutoencoderError, match=f"{decoder}, returns .* not finite.*{why}"):
                Autoencoder(folder, asked).decode(torch.randn(1, 4, 8, 8))
    assert Autoencoder(tmp_path / "True", torch.bfloat16).dtype == torch.bfloat16
