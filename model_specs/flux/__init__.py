"""Flux (Black Forest Labs 2024): blocks of two streams, then blocks whose weights both share.

Structure of diffusers' ``FluxTransformer2DModel``. Between blocks pass the image's tokens and the
text's; the last block drops the text. The chain takes and gives latents [c, h, w], which its
first layer packs and its last unpacks as diffusers' ``FluxPipeline``. There are no long skips.
"""

from model_specs.common.texts import FLUX
from model_specs.flux.chain import build_backbone as build_backbone
from model_specs.flux.config import CONFIGS as CONFIGS
from model_specs.flux.published import PUBLISHED_AS as PUBLISHED_AS
from model_specs.flux.published import config_from_published as config_from_published
from model_specs.flux.published import published as published

TEXTS = (FLUX,)
