"""A tiny StableVideoDiffusionPipeline of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.diffusion.schedulers import PUBLISHED
from tests.model_specs.test_appended import LEVELS

FRAMES, SIDE = 2, 16
UNET: dict[str, Any] = {**LEVELS, "in_channels": 8, "num_frames": FRAMES}
CLASS = "diffusers:UNetSpatioTemporalConditionModel"


def make_pipeline(folder: Path) -> Any:
    """The pipeline, also written to ``folder``; frames of ``SIDE`` become latents of 8."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=224, patch_size=112, projection_dim=16,
    )  # fmt: skip
    pipeline = diffusers.StableVideoDiffusionPipeline(
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
            latent_channels=4, sample_size=SIDE, scaling_factor=0.2,
        ),
        image_encoder=transformers.CLIPVisionModelWithProjection(vision),
        unet=diffusers.UNetSpatioTemporalConditionModel(**UNET),
        scheduler=diffusers.EulerDiscreteScheduler.from_config(PUBLISHED["svd"]),
        feature_extractor=transformers.CLIPImageProcessor(size=224, crop_size=224),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    for part in (pipeline.vae, pipeline.image_encoder, pipeline.unet):
        part.eval()
    pipeline.save_pretrained(folder)
    return pipeline
