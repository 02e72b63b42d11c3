"""PixArt-alpha and -sigma: text to image (arXiv:2310.00426, arXiv:2403.04692).

The structure is that of diffusers' ``PixArtTransformer2DModel``. Every block is three layers:
self-attention, cross-attention to the projected caption, feed-forward. One timestep embedding
modulates all blocks; each block adds its own table. There are no long skips.
"""

from model_specs.common.text_recipes import PIXART
from model_specs.pixart.chain import build_backbone as build_backbone
from model_specs.pixart.config import CONFIGS as CONFIGS
from model_specs.pixart.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.pixart.published_weights import config_from_published as config_from_published
from model_specs.pixart.published_weights import published as published

TEXTS = (PIXART,)
