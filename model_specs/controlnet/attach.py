"""A ControlNet for a published UNet: that of a folder, or a new one."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import Published, to_published
from megatron_pulse.diffusion.published import read_folder
from megatron_pulse.profile.parameters import meta_weights
from model_specs.controlnet.published_weights import joined

NEW = "new"
"""Value instead of a folder: a new ControlNet, initialised as the UNet's encoder."""


def with_controlnet(
    unet: Path, tensors: Mapping[str, Tensor], source: str
) -> tuple[Backbone, Mapping[str, Tensor]]:
    """Backbone of the UNet in folder ``unet`` with a ControlNet, and the published tensors of both.

    ``source`` is the ControlNet's folder, or asks for a new one. Raises ValueError with all reasons
    why the ControlNet does not fit the UNet.
    """
    from model_specs import load_published, published_form, read_published

    place = None if source == NEW else Path(source)
    control = None if place is None else read_published(place)
    backbone = load_published(joined(read_published(unet), control))
    form = published_form(dataclasses.replace(backbone, kept={}))
    assert form is not None  # it was published
    kept = {
        key: value
        for key, value in (control or {}).items()
        if not key.startswith("_") and form.config.get(key, form) != value
    }
    backbone = dataclasses.replace(backbone, kept=kept)
    branch: Mapping[str, Tensor]
    branch = _new(backbone, form, tensors) if place is None else read_folder(place)
    named = {f"{form.part}{name}": tensor for name, tensor in branch.items()}
    return backbone, ChainMap(named, tensors)  # type: ignore[arg-type]


def _new(backbone: Backbone, form: Published, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a new ControlNet, as diffusers' ``from_unet`` makes it.

    They are the encoder's weights and convolutions of zeros. Torch's default initialisation (seed
    0) fills the layers that embed the control picture.
    """
    generator = torch.Generator().manual_seed(0)
    published = to_published(form, meta_weights(backbone))
    wanted = {n.removeprefix(form.part): t for n, t in published.items() if n.startswith(form.part)}
    made = {}
    for name, like in sorted(wanted.items()):
        embedded = name.startswith("controlnet_cond_embedding.") and ".conv_out." not in name
        if embedded:
            weight = wanted[f"{name.rpartition('.')[0]}.weight"]
            bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
            made[name] = (2 * torch.rand(like.shape, generator=generator) - 1) * bound
        elif name.startswith("controlnet_"):
            made[name] = torch.zeros(like.shape)
        elif name in tensors:  # else the UNet lacks it, and the import reports it
            made[name] = tensors[name]
    return made
