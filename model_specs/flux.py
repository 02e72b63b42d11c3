"""Flux (Black Forest Labs 2024): blocks of two streams, then blocks whose weights both share.

Structure of diffusers' ``FluxTransformer2DModel``. Between blocks pass the image's tokens and the
text's; the last block drops the text. The chain takes and gives latents [c, h, w], which its
first layer packs and its last unpacks as diffusers' ``FluxPipeline``. There are no long skips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import Joined, PerHead, Published, Rule
from model_specs._mmdit import joint_rules
from model_specs._options import run_choice
from model_specs._published import require_settings

PUBLISHED_AS = "FluxTransformer2DModel"
PACKED = 2
"""A token is a square of this many latent pixels along each side."""


@dataclass(frozen=True)
class FluxConfig:
    """Sizes of a Flux; latents have ``in_channels`` and the side ``sample_size``.

    ``num_layers`` blocks have two streams, ``num_single_layers`` follow. ``axes_dims_rope`` are
    the features of each head that turn with a token's three coordinates: (0, row, column), and 0
    for text. With ``guidance_embeds`` the batch holds a scale of guidance (3.5, say).
    """

    num_layers: int = 19
    num_single_layers: int = 38
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    sample_size: int = run_choice(128, "tokens are at the places of {0.side} rows and columns")
    in_channels: int = 16
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    context_length: int = run_choice(512, "text has no positions")
    guidance_embeds: bool = True
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def side(self) -> int:
        """Tokens along one side of the latent."""
        return self.sample_size // PACKED

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least 1, is {value}"
            for key, value in vars(self).items()
            if type(value) is int and value < 1
        ]
        if self.sample_size % PACKED:
            found.append(f"sample_size: must be divisible by {PACKED}, is {self.sample_size}")
        axes = self.axes_dims_rope
        if len(axes) != 3 or any(axis < 2 or axis % 2 for axis in axes):
            found.append(f"axes_dims_rope: must be three even numbers from 2 on, is {axes}")
        elif sum(axes) != self.attention_head_dim:
            found.append(
                f"axes_dims_rope: must add up to attention_head_dim={self.attention_head_dim}, "
                f"is {axes}"
            )
        return found


# Sizes as in the config.json files of black-forest-labs/FLUX.1-dev and FLUX.1-schnell.
CONFIGS: dict[str, FluxConfig] = {
    "flux-tiny": FluxConfig(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        sample_size=8,
        in_channels=4,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        context_length=6,
        axes_dims_rope=(2, 2, 4),
    ),
    "flux-dev": FluxConfig(),
    "flux-schnell": FluxConfig(guidance_embeds=False, context_length=256),
}


def build_backbone(name: str, config: FluxConfig) -> Backbone:
    """``time_text_embed``, ``x_embedder``, ``context_embedder``, both kinds of blocks, head."""
    latent = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
    image = TensorSpec((config.side**2, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.context_length, config.dim), batch_dim=1, sequence=True)
    scalars = ("timesteps", "guidance") if config.guidance_embeds else ("timesteps",)
    fields = {
        **{key: TensorSpec((), dtype="float32") for key in scalars},
        "context": TensorSpec((config.context_length, config.joint_attention_dim)),
        "pooled": TensorSpec((config.pooled_projection_dim,)),
    }

    def build(kind: str, **arguments: Any) -> Callable[[LayerContext], Any]:
        return functools.partial(_build, config, kind, arguments)

    last = config.num_single_layers - 1
    layers = (
        Layer(
            "time_text_embed",
            build("TimeTextGuidanceEmbed"),
            (latent,),
            (latent,),
            provides={"temb": TensorSpec((config.dim,))},
            uses=(*scalars, "pooled"),
            embedder=True,
        ),
        Layer("x_embedder", build("PackedEmbed"), (latent,), (image,)),
        Layer(
            "context_embedder",
            build("context_embedder"),
            (image,),
            (image, text),
            uses=("context",),
        ),
        *(
            Layer(
                f"transformer_blocks.{i}",
                build("double_block"),
                (image, text),
                (image, text),
                uses=("temb",),
            )
            for i in range(config.num_layers)
        ),
        *(
            Layer(
                f"single_transformer_blocks.{i}",
                build("single_block", text_ends=i == last),
                (image, text),
                (image, text) if i < last else (image,),
                uses=("temb",),
            )
            for i in range(config.num_single_layers)
        ),
        Layer("head", build("head"), (image,), (latent,), uses=("temb",)),
    )
    return Backbone(name, layers, fields)


def _build(
    config: FluxConfig, kind: str, arguments: Mapping[str, Any], context: LayerContext
) -> Any:
    """The module that ``kind`` makes, sized by ``config`` and ``arguments``."""
    from model_specs.modules import flux

    return getattr(flux, kind)(config, context, **arguments)


# Settings with our names, and their values where a config.json leaves them out.
_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}


def published(config: FluxConfig) -> Published:
    """As diffusers stores it; its channels are those of a packed token."""
    settings = {
        **{key: getattr(config, key) for key in _DEFAULTS},
        "in_channels": config.in_channels * PACKED**2,
        "out_channels": None,
        "patch_size": 1,
    }
    rules = (
        Rule("x_embedder.linear.*", "x_embedder.*"),
        Rule(
            "*.attn.linear_qkv.*",
            ("*.attn.to_q.*", "*.attn.to_k.*", "*.attn.to_v.*"),
            PerHead(config.num_attention_heads),
        ),
        Rule("*.attn.q_layernorm.*", "*.attn.norm_q.*"),
        Rule("*.attn.k_layernorm.*", "*.attn.norm_k.*"),
        Rule(
            ("*.proj_out_attn.weight", "*.proj_out_mlp.weight"),
            "*.proj_out.weight",
            Joined((config.dim, 4 * config.dim), dim=1),
        ),
        Rule("*.proj_out_attn.bias", "*.proj_out.bias"),
        *joint_rules(config.num_attention_heads),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> FluxConfig:
    """The sizes in a ``config.json``; ValueError lists the settings that are not implemented.

    It holds neither the size of the latents nor the length of texts, which are the run's choice;
    unless told otherwise texts are as long as those of FLUX.1-dev, or without guidance -schnell.
    """
    packed = config.get("in_channels", 64)
    required: dict[str, Any] = {"patch_size": 1}
    if config.get("out_channels") is not None:
        required["out_channels"] = packed
    if packed % PACKED**2:
        required["in_channels"] = f"a multiple of {PACKED**2}"
    require_settings(config, required)
    settings = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    settings["axes_dims_rope"] = tuple(settings["axes_dims_rope"])
    length = 512 if settings["guidance_embeds"] else 256
    return FluxConfig(**settings, in_channels=packed // PACKED**2, context_length=length)
