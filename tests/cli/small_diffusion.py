"""A whole tiny Stable Diffusion, as a pipeline's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.cli.small_unet import TINY as UNET
from tests.cli.test_data import make_vae
from tests.encoders.pipelines import LENGTH, make_pipeline

TINY: dict[str, Any] = {**UNET, "sample_size": 4, "cross_attention_dim": 8}


def make_diffusion(root: Path) -> Path:
    """Writes it to a folder that is there."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "vae": ["diffusers", "AutoencoderKL"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    make_pipeline(root, "clip", **index)
    make_vae(
        root / "vae", latent_channels=4, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    diffusers.UNet2DConditionModel(**TINY).save_pretrained(root / "unet")
    diffusers.DDIMScheduler(
        clip_sample=False, timestep_spacing="trailing", beta_schedule="scaled_linear"
    ).save_pretrained(root / "scheduler")
    return root


def backbone(folder: Path) -> list[str]:
    options = ("sample_size=4", f"text_length={LENGTH}")
    said = [word for option in options for word in ("--option", option)]
    return ["--module", f"diffusers:{folder / 'unet'}", *said[2:]]
