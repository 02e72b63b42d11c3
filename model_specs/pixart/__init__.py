"""PixArt-alpha and -sigma: text to image (arXiv:2310.00426, arXiv:2403.04692).

Structure of diffusers' ``PixArtTransformer2DModel``: every block is self-attention,
cross-attention to the projected caption and feed-forward, each a layer. One embedding of the
timestep modulates all blocks, each of which adds a table of its own. There are no long skips.
"""

from model_specs.common.texts import PIXART
from model_specs.pixart.chain import build_backbone as build_backbone
from model_specs.pixart.config import CONFIGS as CONFIGS
from model_specs.pixart.published import PUBLISHED_AS as PUBLISHED_AS
from model_specs.pixart.published import config_from_published as config_from_published
from model_specs.pixart.published import published as published

TEXTS = (PIXART,)
