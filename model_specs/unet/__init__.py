"""UNet of Stable Diffusion at any size (Rombach et al., CVPR 2022; diffusers' structure).

A boundary carries one image or, inside an attention, the pair (tokens, residual image). Skips are
outputs of ``conv_in``, of downsamplers, and of each resnet with its attention. ``time_embedding``
computes the embedding that every resnet adds.
"""

from model_specs.common.text_recipes import SD, SDXL
from model_specs.unet.chain import build_backbone as build_backbone
from model_specs.unet.config import CONFIGS as CONFIGS
from model_specs.unet.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.unet.published_weights import config_from_published as config_from_published
from model_specs.unet.published_weights import published as published

TEXTS = (SDXL, SD)
