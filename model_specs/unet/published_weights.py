"""Format of a UNet in diffusers' ``UNet2DConditionModel``; needs no torch.

diffusers' ``attention_head_dim`` is the number of heads. The last level's
``transformer_layers_per_block`` also applies to the mid block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pulse.backbone.published_weights import PerHead, Published, Rule, SwappedHalves
from megatron_pulse.errors import format_faults
from model_specs.unet.config import UNetConfig

PUBLISHED_AS = "UNet2DConditionModel"

_ATTENTION = {"Down": "CrossAttnDownBlock2D", "Up": "CrossAttnUpBlock2D"}
_PLAIN = {"Down": "DownBlock2D", "Up": "UpBlock2D"}

# Settings with one supported meaning. The first value is diffusers' default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "center_input_sample": (False,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "only_cross_attention": (False,),
    "downsample_padding": (1,),
    "mid_block_scale_factor": (1,),
    "dropout": (0.0,),
    "act_fn": ("silu", "swish"),
    "norm_eps": (1e-5,),
    "reverse_transformer_layers_per_block": (None,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "num_attention_heads": (None,),
    "dual_cross_attention": (False,),
    "class_embed_type": (None,),
    "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False,),
    "resnet_out_scale_factor": (1.0,),
    "time_embedding_type": ("positional",),
    "time_embedding_dim": (None,),
    "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,),
    "time_cond_proj_dim": (None,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "attention_type": ("default",),
    "class_embeddings_concat": (False,),
    "mid_block_only_cross_attention": (None, False),
    "cross_attention_norm": (None,),
}

# Numbers with the same name in diffusers.
_SAME = (
    "sample_size", "in_channels", "out_channels", "layers_per_block", "norm_num_groups",
    "cross_attention_dim",
)  # fmt: skip

# Facts without a setting in diffusers, which ignores these keys: a null class at the end, and the
# number of time ids if their width does not determine it.
_NULL_CLASS = "_null_class"
_NUM_TIME_IDS = "_num_time_ids"

# Settings without effect here: fused attention ignores the first; the second belongs to another
# added embedding.
_WITHOUT_EFFECT = {"upcast_attention", "addition_embed_type_num_heads"}

# diffusers' defaults of settings that differ between UNets.
_DEFAULTS: dict[str, Any] = {
    "sample_size": None,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": [*[_ATTENTION["Down"]] * 3, _PLAIN["Down"]],
    "up_block_types": [_PLAIN["Up"], *[_ATTENTION["Up"]] * 3],
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "cross_attention_dim": 1280,
    "transformer_layers_per_block": 1,
    "attention_head_dim": 8,
    "use_linear_projection": False,
    "num_class_embeds": None,
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
}


def published(config: UNetConfig) -> Published | None:
    """Format in diffusers, or None for UNets that diffusers cannot express.

    Those have no context, unequal depths of the last level and the mid block, or coordinates.
    """
    depth, mid = config.transformer_depth, config.mid_transformer_depth
    if not config.reads_context or not mid or depth[-1] not in (0, mid) or config.patchwise:
        return None
    heads = config.num_heads
    settings: dict[str, Any] = {
        **{key: getattr(config, key) for key in (*_SAME, "use_linear_projection")},
        "down_block_types": _block_types("Down", depth),
        "up_block_types": _block_types("Up", depth[::-1]),
        "block_out_channels": list(config.block_out_channels),
        "transformer_layers_per_block": [*(d or 1 for d in depth[:-1]), mid],
        "attention_head_dim": heads[0] if len({*heads}) == 1 else list(heads),
        "num_class_embeds": config.num_classes + config.null_class if config.num_classes else None,
    }
    if config.num_classes and config.null_class:
        settings[_NULL_CLASS] = True
    if config.pooled_dim:
        added = config.pooled_dim + config.num_time_ids * config.time_id_dim
        settings |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": config.time_id_dim,
            "projection_class_embeddings_input_dim": added,
        }
        if config.num_time_ids != _num_time_ids(added, config.time_id_dim):
            settings[_NUM_TIME_IDS] = config.num_time_ids
    return Published("diffusers", PUBLISHED_AS, settings, parameter_rules(config))


def _block_types(kind: str, depth: Sequence[int]) -> list[str]:
    return [_ATTENTION[kind] if d else _PLAIN[kind] for d in depth]


def parameter_rules(config: UNetConfig) -> tuple[Rule, ...]:
    """Rules from our parameter names to diffusers'; the number of heads differs between levels."""
    last = config.num_levels - 1
    heads = {f"down_blocks.{level}": config.heads(level) for level in range(last + 1)}
    heads |= {f"up_blocks.{last - level}": config.heads(level) for level in range(last + 1)}
    heads["mid_block"] = config.heads(last)
    fused = [
        Rule(f"{block}.*.{ours}.weight", tuple(f"{block}.*.{t}.weight" for t in theirs), layout)
        for block, layout in ((block, PerHead(number)) for block, number in heads.items())
        for ours, theirs in (
            ("attn1.linear_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
            ("attn2.linear_kv", ("attn2.to_k", "attn2.to_v")),
        )
    ]
    return (
        *fused,
        Rule("*.attn2.linear_q.*", "*.attn2.to_q.*"),
        Rule("*.linear_proj.*", "*.to_out.0.*"),
        Rule("*.ff.linear_fc1.*", "*.ff.net.0.proj.*", SwappedHalves()),
        Rule("*.ff.linear_fc2.*", "*.ff.net.2.*"),
        Rule("*.proj_in.norm.*", "*.norm.*"),
        Rule("*.proj_in.linear.*", "*.proj_in.*"),
        Rule("*.proj_out.linear.*", "*.proj_out.*"),
        Rule("conv_in.conv.*", "conv_in.*"),
        Rule("conv_out.norm.*", "conv_norm_out.*"),
        Rule("conv_out.conv.*", "conv_out.*"),
        Rule("time_embedding.time.*", "time_embedding.*"),
        Rule("time_embedding.*_embedding.*", "*_embedding.*"),
    )


def config_from_published(config: Mapping[str, Any]) -> UNetConfig:
    """Read the sizes in a ``config.json``; the text length is not stored.

    Raises ValueError that lists every unsupported setting.
    """
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    known = _FIXED.keys() | _DEFAULTS.keys() | _WITHOUT_EFFECT
    faults = [f"{key}: not a known setting, is {given[key]!r}" for key in given.keys() - known]
    for key, allowed in _FIXED.items():
        if _one(given.get(key, allowed[0])) not in allowed:
            faults.append(f"{key}: must be {allowed[0]!r}, is {given[key]!r}")
    settings = {**_DEFAULTS, **config}
    for key in _SAME:
        settings[key] = _one(settings[key])
        if not isinstance(settings[key], int):
            faults.append(f"{key}: must be one number, is {settings[key]!r}")
    widths = _per_level(settings["block_out_channels"], 1)
    levels = len(widths)
    attends = [kind != _PLAIN["Down"] for kind in settings["down_block_types"]]
    for key, kind, at in (
        ("down_block_types", "Down", attends),
        ("up_block_types", "Up", attends[::-1]),
    ):
        types = list(settings[key])
        if types != (expected := _block_types(kind, at)) or len(types) != levels:
            faults.append(f"{key}: must be {expected} for {levels} levels, is {types}")
    depths = _per_level(settings["transformer_layers_per_block"], levels)
    heads = _per_level(settings["attention_head_dim"], levels)
    for key, values in (
        ("block_out_channels", widths),
        ("transformer_layers_per_block", depths),
        ("attention_head_dim", heads),
    ):
        if len(values) != levels or not all(isinstance(value, int) for value in values):
            faults.append(f"{key}: must be a number for each level, is {settings[key]!r}")
    if 0 in (depth := [d for d, a in zip(depths, [*attends[:-1], True], strict=False) if a]):
        faults.append(
            f"transformer_layers_per_block: must not be 0 in levels with attention, is {depth}"
        )
    classes = settings["num_class_embeds"]
    null_class = bool(config.get(_NULL_CLASS))
    if classes is not None and (not isinstance(classes, int) or classes < 1 + null_class):
        faults.append(
            f"num_class_embeds: must be null or at least {1 + null_class}, is {classes!r}"
        )
    added = _text_time(settings, faults)
    if faults:
        raise ValueError(
            format_faults("UNet2DConditionModel has unsupported settings", sorted(faults))
        )
    return UNetConfig(
        **{key: settings[key] for key in (*_SAME, "use_linear_projection")},
        block_out_channels=widths,
        transformer_depth=tuple(d if a else 0 for d, a in zip(depths, attends, strict=True)),
        mid_transformer_depth=depths[-1],
        num_heads=_per_level(_one(heads), 1),
        num_classes=classes - null_class if classes else 0,
        null_class=null_class if classes else True,
        **added,
    )


def _text_time(settings: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Options of SDXL's added embedding; the file gives the joint width of pooled text and time
    ids.
    """
    kind = settings["addition_embed_type"]
    width = settings["addition_time_embed_dim"]
    joined = settings["projection_class_embeddings_input_dim"]
    if kind is None:
        return {}
    if kind != "text_time":
        faults.append(f"addition_embed_type: must be null or 'text_time', is {kind!r}")
        return {}
    if width is None or joined is None:
        faults.append(
            "addition_embed_type: 'text_time' needs addition_time_embed_dim and "
            "projection_class_embeddings_input_dim"
        )
        return {}
    number = settings.get(_NUM_TIME_IDS) or _num_time_ids(joined, width)
    if joined <= number * width:
        faults.append(
            f"projection_class_embeddings_input_dim: must exceed {number} time ids of {width}, "
            f"is {joined}"
        )
    return {"pooled_dim": joined - number * width, "num_time_ids": number, "time_id_dim": width}


def _num_time_ids(joined: int, width: int) -> int:
    """Number of time ids: 5 if the remaining width is the 1280 of SDXL's text encoder, else 6.

    SDXL's refiner has 5.
    """
    return 5 if joined - 5 * width == 1280 else 6


def _one(value: Any) -> Any:
    """Collapse a list of equal values to one value."""
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _per_level(value: Any, levels: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * levels
