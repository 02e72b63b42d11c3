"""SUV: the skiparse U-shaped video transformer of Open-Sora Plan 1.5 (PKU-YuanGroup).

Groups of two-stream blocks attend with a sparsity each: full attention at both ends, the sparsest
in the middle. Each group before the middle passes its tokens as a skip to its mirror image. A block
is two layers, attention and MLPs. ``double_ff`` is the released 8.5B model (MindSpeed-MM's
``SparseUMMDiT``); without it, both streams share an MLP (``OpenSoraT2V_v1_5``).
"""

from model_specs.common.text_recipes import SUV
from model_specs.suv.chain import build_backbone as build_backbone
from model_specs.suv.config import CONFIGS as CONFIGS
from model_specs.suv.published_weights import published as published

TEXTS = (SUV,)
