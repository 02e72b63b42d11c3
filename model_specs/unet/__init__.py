"""The UNet of Stable Diffusion at any size (Rombach et al., CVPR 2022; diffusers' structure).

Between layers there is one image, or, inside an attention, the pair (tokens, image that is added
at its end). Skips are outputs of ``conv_in``, of downsamplers and of what ends each resnet and its
attention. ``time_embedding`` computes what every resnet adds.
"""

from model_specs.common.texts import SD, SDXL
from model_specs.unet.chain import build_backbone
from model_specs.unet.config import CONFIGS
from model_specs.unet.published import PUBLISHED_AS, config_from_published, published

TEXTS = (SDXL, SD)
"""How its text is made; the one whose fields it reads."""

__all__ = [
    "CONFIGS",
    "PUBLISHED_AS",
    "TEXTS",
    "build_backbone",
    "config_from_published",
    "published",
]
