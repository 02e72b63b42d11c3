"""DiT: a class-conditional transformer on latents (Peebles and Xie, ICCV 2023, arXiv:2212.09748).

Structure of diffusers' ``DiTTransformer2DModel``, where every block embeds timestep and class for
itself, and the head uses what block 0 embeds. A block is two layers; the three modulation vectors
that its feed-forward needs travel from one to the other. There are no long skips.
"""

from model_specs.dit.chain import build_backbone as build_backbone
from model_specs.dit.config import CONFIGS as CONFIGS
from model_specs.dit.published import PUBLISHED_AS as PUBLISHED_AS
from model_specs.dit.published import config_from_published as config_from_published
from model_specs.dit.published import published as published
