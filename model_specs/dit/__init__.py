"""DiT: a class-conditional transformer on latents (Peebles and Xie, ICCV 2023, arXiv:2212.09748).

The structure is that of diffusers' ``DiTTransformer2DModel``. Every block has its own embedding of
timestep and class; the head uses block 0's. A block is two layers. The three modulation vectors of
the feed-forward travel between them. There are no long skips.
"""

from model_specs.dit.chain import build_backbone as build_backbone
from model_specs.dit.config import CONFIGS as CONFIGS
from model_specs.dit.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.dit.published_weights import config_from_published as config_from_published
from model_specs.dit.published_weights import published as published
