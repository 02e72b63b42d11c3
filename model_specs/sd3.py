"""Stable Diffusion 3 and 3.5: MMDiT (Esser et al. 2024, arXiv:2403.03206).

Structure of diffusers' ``SD3Transformer2DModel``. Between blocks pass the image's tokens and the
text's; the last block drops the text. There are no long skips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import PerHead, Published, Rule
from model_specs._mmdit import joint_rules
from model_specs._options import run_choice
from model_specs._published import require_settings

PUBLISHED_AS = "SD3Transformer2DModel"


@dataclass(frozen=True)
class SD3Config:
    """Sizes of an SD3; ``sample_size`` is the side of the latents that it sees.

    The table of positions has ``pos_embed_max_size`` squared places, spaced for latents of the
    side ``base_sample_size`` (diffusers' "sample_size"); smaller latents see its centre.
    ``context_length`` counts the text tokens: 77 of CLIP and those of T5. ``qk_norm`` is an
    RMSNorm of each head's queries and keys; blocks in ``dual_attention_layers`` have a second
    attention within the image (SD3.5).
    """

    num_layers: int = 24
    num_attention_heads: int = 24
    attention_head_dim: int = 64
    sample_size: int = run_choice(
        128, "positions are the middle {0.side} of the table's {0.pos_embed_max_size} a side"
    )
    patch_size: int = 2
    in_channels: int = 16
    out_channels: int = 16
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 2048
    pos_embed_max_size: int = 192
    base_sample_size: int = 128
    context_length: int = run_choice(154, "text has no positions")
    qk_norm: bool = False
    dual_attention_layers: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def side(self) -> int:
        """Patches along one side of the latent."""
        return self.sample_size // self.patch_size

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least 1, is {value}"
            for key, value in vars(self).items()
            if type(value) is int and value < 1
        ]
        if found:
            return found
        if self.dim % 4:
            found.append(
                "attention_head_dim: num_attention_heads * attention_head_dim must be divisible "
                f"by 4, is {self.dim}"
            )
        if self.base_sample_size % self.patch_size and self.base_sample_size != self.sample_size:
            found.append(
                f"base_sample_size: must be divisible by patch_size={self.patch_size}, "
                f"is {self.base_sample_size}"
            )
        if self.sample_size % self.patch_size:
            found.append(
                f"sample_size: must be divisible by patch_size={self.patch_size}, "
                f"is {self.sample_size}"
            )
        if self.side > self.pos_embed_max_size:
            found.append(
                f"sample_size: {self.side} patches along a side are more than "
                f"pos_embed_max_size={self.pos_embed_max_size}"
            )
        if not set(self.dual_attention_layers) <= set(range(self.num_layers)):
            found.append(
                f"dual_attention_layers: must be among the {self.num_layers} blocks, "
                f"are {self.dual_attention_layers}"
            )
        return found


# Sizes as in the config.json files of stabilityai/stable-diffusion-3-medium-diffusers,
# stable-diffusion-3.5-medium and stable-diffusion-3.5-large.
CONFIGS: dict[str, SD3Config] = {
    "sd3-tiny": SD3Config(
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=8,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        pos_embed_max_size=6,
        base_sample_size=8,
        context_length=6,
    ),
    "sd3-medium": SD3Config(),
    "sd3.5-medium": SD3Config(
        pos_embed_max_size=384, qk_norm=True, dual_attention_layers=tuple(range(13))
    ),
    "sd3.5-large": SD3Config(num_layers=38, num_attention_heads=38, qk_norm=True),
}


def build_backbone(name: str, config: SD3Config) -> Backbone:
    """``time_text_embed``, ``pos_embed``, ``context_embedder``, ``transformer_blocks.*``, head."""
    latent = (config.sample_size, config.sample_size)
    sample = TensorSpec((config.in_channels, *latent))
    prediction = TensorSpec((config.out_channels, *latent))
    image = TensorSpec((config.side**2, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.context_length, config.dim), batch_dim=1, sequence=True)
    fields = {
        "timesteps": TensorSpec((), dtype="float32"),
        "context": TensorSpec((config.context_length, config.joint_attention_dim)),
        "pooled": TensorSpec((config.pooled_projection_dim,)),
    }

    def build(kind: str, **arguments: Any) -> Callable[[LayerContext], Any]:
        return functools.partial(_build, config, kind, arguments)

    last = config.num_layers - 1
    layers = (
        Layer(
            "time_text_embed",
            build("time_text_embed"),
            (sample,),
            (sample,),
            provides={"temb": TensorSpec((config.dim,))},
            uses=("timesteps", "pooled"),
            embedder=True,
        ),
        Layer("pos_embed", build("PositionedPatches"), (sample,), (image,)),
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
                build("block", index=i),
                (image, text),
                (image, text) if i < last else (image,),
                uses=("temb",),
            )
            for i in range(config.num_layers)
        ),
        Layer("head", build("head"), (image,), (prediction,), uses=("temb",)),
    )
    return Backbone(name, layers, fields)


def _build(
    config: SD3Config, kind: str, arguments: Mapping[str, Any], context: LayerContext
) -> Any:
    """The module that ``kind`` makes, sized by ``config`` and ``arguments``."""
    from model_specs.modules import sd3

    return getattr(sd3, kind)(config, context, **arguments)


# Settings with our names, and their values where a config.json leaves them out.
_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 18,
    "num_attention_heads": 18,
    "attention_head_dim": 64,
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (),
}


def published(config: SD3Config) -> Published:
    """As diffusers stores it. The positions are a buffer of its state dict, and of ours."""
    settings = {
        **{key: getattr(config, key) for key in _DEFAULTS},
        "sample_size": config.base_sample_size,
        "caption_projection_dim": config.dim,
        "qk_norm": "rms_norm" if config.qk_norm else None,
    }
    rules = (
        Rule(
            "*.attn2.linear_qkv.*",
            ("*.attn2.to_q.*", "*.attn2.to_k.*", "*.attn2.to_v.*"),
            PerHead(config.num_attention_heads),
        ),
        Rule("*.attn2.linear_proj.*", "*.attn2.to_out.0.*"),
        Rule("*.attn2.core_attention.q_layernorm.*", "*.attn2.norm_q.*"),
        Rule("*.attn2.core_attention.k_layernorm.*", "*.attn2.norm_k.*"),
        *joint_rules(config.num_attention_heads),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> SD3Config:
    """The sizes in a ``config.json``; ValueError lists the settings that are not implemented.

    Latents have the size that the positions are spaced for, or the largest that the table has
    places for; texts have the default length. Both are the run's choice.
    """
    settings = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    if settings["out_channels"] is None:
        settings["out_channels"] = settings["in_channels"]
    qk_norm = config.get("qk_norm")
    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    required = {"caption_projection_dim": width}
    if qk_norm is not None:
        required["qk_norm"] = "rms_norm"
    require_settings({"caption_projection_dim": 1152, **config}, required)
    settings["dual_attention_layers"] = tuple(settings["dual_attention_layers"])
    base = settings.pop("sample_size")
    largest = settings["pos_embed_max_size"] * settings["patch_size"]
    return SD3Config(
        **settings,
        sample_size=min(base, largest),
        base_sample_size=base,
        qk_norm=qk_norm is not None,
    )
