"""Locked UNet with a trainable control branch (ControlNet; Zhang et al., ICCV 2023).

The branch is a copy of the UNet's encoder that reads a control image, ``conditioning``. Both run
side by side, layer by layer. A boundary carries the tensors of the locked encoder, then those of
the branch. Each resnet of the decoder takes both skips of its level. The branch's skip passes a
zero-initialised convolution. Both encoders' layers thus fold onto the decoder layers that consume
their skips.
"""

from model_specs.common.text_recipes import SD, SDXL
from model_specs.controlnet.chain import build_backbone as build_backbone
from model_specs.controlnet.config import CONFIGS as CONFIGS
from model_specs.controlnet.published_weights import PUBLISHED_AS as PUBLISHED_AS
from model_specs.controlnet.published_weights import config_from_published as config_from_published
from model_specs.controlnet.published_weights import published as published

TEXTS = (SDXL, SD)
