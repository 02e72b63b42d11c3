"""Format of diffusers' ``ControlNetModel`` for a control branch; needs no torch.

Published tensors are the branch's, with the prefix ``controlnet.`` here, and those of the
controlled UNet, in the format of ``UNet2DConditionModel``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Published, Rule
from megatron_pulse.errors import format_faults
from model_specs.controlnet.chain import BRANCH, build_backbone
from model_specs.controlnet.config import ControlNetConfig
from model_specs.unet.config import UNetConfig
from model_specs.unet.published_weights import config_from_published as unet_from_published
from model_specs.unet.published_weights import parameter_rules
from model_specs.unet.published_weights import published as published_unet

PUBLISHED_AS = "ControlNetModel"

_UNET_ONLY = ("sample_size", "out_channels", "up_block_types")
"""UNet settings absent from a ControlNetModel."""

_OWN = {"conditioning_channels": 3, "conditioning_embedding_out_channels": (16, 32, 96, 256)}
"""Settings absent from the UNet, with diffusers' defaults."""

_FIXED = {"controlnet_conditioning_channel_order": "rgb", "global_pool_conditions": False}
"""Settings with only one supported value."""


def published(config: ControlNetConfig) -> Published | None:
    """Format of the branch in diffusers, with the UNet beside it; None without a matching UNet."""
    form = published_unet(_unet_of(config))
    if form is None:
        return None
    settings = {
        key: value
        for key, value in form.config.items()
        if key not in _UNET_ONLY and not key.startswith("_")
    }
    settings["conditioning_channels"] = config.conditioning_channels
    settings["conditioning_embedding_out_channels"] = list(config.conditioning_widths)
    return Published("diffusers", PUBLISHED_AS, settings, _rules(config), part=BRANCH)


def _unet_of(config: ControlNetConfig) -> UNetConfig:
    fields = dataclasses.fields(UNetConfig)
    return UNetConfig(**{field.name: getattr(config, field.name) for field in fields})


def _rules(config: ControlNetConfig) -> tuple[Rule, ...]:
    """Rules of the branch's own convolutions, and the UNet's rules for both encoders."""
    layers = build_backbone("", config).layers
    skips = [name for layer in layers for name in layer.pushes if not name.startswith(BRANCH)]
    taken = {name: layer.name for layer in layers for name in layer.pops}
    embedding = f"{BRANCH}controlnet_cond_embedding"
    return (
        *(
            Rule(f"{taken[skip]}.zero.*", f"{BRANCH}controlnet_down_blocks.{i}.*")
            for i, skip in enumerate(skips)
        ),
        Rule(f"{BRANCH}join.zero.*", f"{BRANCH}controlnet_mid_block.*"),
        Rule(f"{BRANCH}conv_in.picture_in.*", f"{embedding}.conv_in.*"),
        Rule(f"{BRANCH}conv_in.picture_out.*", f"{embedding}.conv_out.*"),
        Rule(f"{BRANCH}conv_in.blocks.*", f"{embedding}.blocks.*"),
        *(_of_branch(rule) for rule in parameter_rules(config)),
        *parameter_rules(config),
    )


def _of_branch(rule: Rule) -> Rule:
    """UNet rule applied to the branch."""
    ours, theirs = (
        (names,) if isinstance(names, str) else names for names in (rule.ours, rule.theirs)
    )
    return Rule(
        tuple(f"{BRANCH}{name}" for name in ours),
        tuple(f"{BRANCH}{name}" for name in theirs),
        rule.layout,
    )


def joined(
    unet_settings: Mapping[str, Any], control: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Join the ``config.json`` of a UNet and of its ControlNet for ``config_from_published``.

    ``control`` None stands for a new branch, as made by diffusers' ``from_unet``. Raises ValueError
    with every fault, including differences between the two.
    """
    ours = unet_from_published(unet_settings)
    result = {key: value for key, value in unet_settings.items() if not key.startswith("_")}
    if control is None:
        return {**result, **_OWN, "_class_name": PUBLISHED_AS}
    named = control.get("_class_name")
    if named != PUBLISHED_AS:
        remedy = "Give the folder of a ControlNetModel, or new."
        raise ValueError(
            format_faults("the control input of the UNet", [f"it is a {named}"], remedy)
        )
    rest = {key: value for key, value in control.items() if not key.startswith("_")}
    faults = [
        f"{key}: must be {value!r}, is {rest[key]!r}"
        for key, value in _FIXED.items()
        if rest.pop(key, value) != value and key in control
    ]
    own = {key: rest.pop(key, value) for key, value in _OWN.items()}
    try:
        for key in _UNET_ONLY:
            if key in unet_settings:
                rest[key] = unet_settings[key]
        theirs = unet_from_published(rest)
    except ValueError as error:
        raise ValueError(f"of the ControlNet: {error}") from error
    faults += [
        f"{key}: {value!r}, but the UNet has {getattr(ours, key)!r}"
        for key, value in vars(theirs).items()
        if getattr(ours, key) != value
    ]
    if faults:
        raise ValueError(format_faults("the ControlNet does not fit this UNet", faults))
    return {**result, **own, "_class_name": PUBLISHED_AS}


def config_from_published(config: Mapping[str, Any]) -> ControlNetConfig:
    """Sizes from the result of ``joined``.

    Raises ValueError for a ControlNet alone, which lacks the UNet's settings.
    """
    if "up_block_types" not in config:
        raise ValueError(
            "a ControlNetModel runs beside the UNet that it controls. Give the folder of that "
            "UNet, and this one with --controlnet"
        )
    rest = {key: value for key, value in config.items() if key not in {*_OWN, *_FIXED}}
    sizes = unet_from_published(rest)
    own = {key: config.get(key, value) for key, value in _OWN.items()}
    return ControlNetConfig(
        **vars(sizes),
        conditioning_channels=own["conditioning_channels"],
        conditioning_widths=tuple(own["conditioning_embedding_out_channels"]),
    )
