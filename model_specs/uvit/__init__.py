"""U-ViT: a ViT on latents with long skips (Bao et al., CVPR 2023, arXiv:2209.12152).

Depth d is d/2 in-blocks, one mid block and d/2 out-blocks. Out-block i takes the output of in-block
d/2-1-i as a skip. Time, class and text are tokens of the sequence, so ``embed`` provides no
conditioning. A block is two layers, attention and MLP.
"""

from model_specs.common.text_recipes import SD
from model_specs.uvit.chain import build_backbone as build_backbone
from model_specs.uvit.config import CONFIGS as CONFIGS
from model_specs.uvit.published_weights import published as published

TEXTS = (SD,)
