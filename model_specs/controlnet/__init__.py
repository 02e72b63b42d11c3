"""A locked UNet with a trainable control branch (ControlNet; Zhang et al., ICCV 2023).

The branch is a copy of the UNet's encoder that sees another picture, ``conditioning``. Both run
beside each other, layer by layer: between layers there are the tensors of the locked encoder, then
those of the branch. Each resnet of the decoder takes both skips of its level, the branch's through
a convolution that begins at zero; so both encoders' layers fold onto the decoder's that take them.
"""

from model_specs.common.texts import SD, SDXL
from model_specs.controlnet.chain import build_backbone as build_backbone
from model_specs.controlnet.config import CONFIGS as CONFIGS
from model_specs.controlnet.published import PUBLISHED_AS as PUBLISHED_AS
from model_specs.controlnet.published import config_from_published as config_from_published
from model_specs.controlnet.published import published as published

TEXTS = (SDXL, SD)
