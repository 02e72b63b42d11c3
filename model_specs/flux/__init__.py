"""Flux (Black Forest Labs 2024): two-stream blocks, then blocks whose weights both streams share.

The structure is that of diffusers' ``FluxTransformer2DModel``. Image and text tokens pass between
blocks; the last block drops the text. The chain maps latents [c, h, w] to latents. Its first layer
packs them and its last unpacks them, as in diffusers' ``FluxPipeline``. There are no long skips.
"""

from model_specs.common.text_recipes import FLUX
from model_specs.flux.chain import build_backbone as build_backbone
from model_specs.flux.config import CONFIGS as CONFIGS
from model_specs.flux.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.flux.published_weights import config_from_published as config_from_published
from model_specs.flux.published_weights import published as published

TEXTS = (FLUX,)
