"""Hunyuan-DiT: a text-to-image DiT with long skips (Li et al., arXiv:2405.08748; diffusers).

Of n blocks, block i < n/2 - 1 passes its output as a skip to block n - 1 - i. The two middle blocks
have no skip. A block is three layers: self-attention, cross-attention to the text, feed-forward.
"""

from model_specs.common.text_recipes import HUNYUAN_DIT
from model_specs.hunyuan_dit.chain import build_backbone as build_backbone
from model_specs.hunyuan_dit.config import CONFIGS as CONFIGS
from model_specs.hunyuan_dit.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.hunyuan_dit.published_weights import config_from_published as config_from_published
from model_specs.hunyuan_dit.published_weights import published as published

TEXTS = (HUNYUAN_DIT,)
