"""Stable Diffusion 3 and 3.5: MMDiT (Esser et al. 2024, arXiv:2403.03206).

The structure is that of diffusers' ``SD3Transformer2DModel``. Image and text tokens pass between
blocks; the last block drops the text. There are no long skips.
"""

from model_specs.common.text_recipes import SD3
from model_specs.sd3.chain import build_backbone as build_backbone
from model_specs.sd3.config import CONFIGS as CONFIGS
from model_specs.sd3.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.sd3.published_weights import config_from_published as config_from_published
from model_specs.sd3.published_weights import published as published

TEXTS = (SD3,)
