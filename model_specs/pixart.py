"""PixArt-alpha and -sigma: text to image (arXiv:2310.00426, arXiv:2403.04692).

Structure of diffusers' ``PixArtTransformer2DModel``: every block is self-attention,
cross-attention to the projected caption and feed-forward, each a layer. One embedding of the
timestep modulates all blocks, each of which adds a table of its own. There are no long skips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import Joined, PerHead, Published, Rule
from model_specs._options import RESPACED, run_choice, settled_by
from model_specs._published import require_settings

PUBLISHED_AS = "PixArtTransformer2DModel"


@dataclass(frozen=True)
class PixArtConfig:
    """Sizes of a PixArt; ``sample_size`` is the side of the latent.

    Positions span ``base_sample_size`` / ``patch_size`` / ``interpolation_scale`` at any size
    (None: ``sample_size``, and one for every 64 of the base), as in a published model that is
    given another size than its own. ``use_additional_conditions``: alpha's, the picture's
    resolution and aspect ratio. With learned variances ``out_channels`` is twice ``in_channels``.
    """

    num_layers: int = 28
    num_attention_heads: int = 16
    attention_head_dim: int = 72
    sample_size: int = run_choice(128, RESPACED)
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    interpolation_scale: float | None = settled_by("position_scale")
    caption_channels: int = 4096
    caption_length: int = run_choice(300, "cross-attention takes captions of any length")
    use_additional_conditions: bool = False
    base_sample_size: int | None = settled_by("base_size")

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least 1, is {value}"
            for key, value in vars(self).items()
            if type(value) is int and value < 1
        ]
        if self.interpolation_scale is not None and self.interpolation_scale <= 0:
            found.append(f"interpolation_scale: must be positive, is {self.interpolation_scale}")
        if found:
            return found
        divisor = 12 if self.use_additional_conditions else 4
        if self.dim % divisor:
            found.append(
                "attention_head_dim: num_attention_heads * attention_head_dim must be divisible "
                f"by {divisor}, is {self.dim}"
            )
        if self.base_size % self.patch_size and self.base_size != self.sample_size:
            found.append(
                f"base_sample_size: must be divisible by patch_size={self.patch_size}, "
                f"is {self.base_size}"
            )
        if self.sample_size % self.patch_size:
            found.append(
                f"sample_size: must be divisible by patch_size={self.patch_size}, "
                f"is {self.sample_size}"
            )
        return found

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def side(self) -> int:
        """Patches along one side of the image."""
        return self.sample_size // self.patch_size

    @property
    def base_size(self) -> int:
        """The size that positions are spaced for."""
        return self.base_sample_size or self.sample_size

    @property
    def position_scale(self) -> float:
        """By what positions are divided."""
        return self.interpolation_scale or self.usual_scale

    @property
    def usual_scale(self) -> int:
        """By what diffusers divides positions where ``interpolation_scale`` is null."""
        return max(self.base_size // 64, 1)


# PixArt-alpha's PixArt-Sigma-XL-2-1024-MS and PixArt-XL-2-1024-MS.
CONFIGS: dict[str, PixArtConfig] = {
    "pixart-sigma": PixArtConfig(),
    "pixart-alpha": PixArtConfig(caption_length=120, use_additional_conditions=True),
    "pixart-tiny": PixArtConfig(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=12,
        sample_size=8,
        caption_channels=24,
        caption_length=10,
    ),
}


def build_backbone(name: str, config: PixArtConfig) -> Backbone:
    """``adaln_single``, ``caption_projection``, ``pos_embed``, blocks of three layers, ``head``."""
    image = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
    prediction = TensorSpec((config.out_channels, config.sample_size, config.sample_size))
    tokens = TensorSpec((config.side**2, config.dim), batch_dim=1, sequence=True)
    times = {"timesteps": TensorSpec((), dtype="float32")}
    if config.use_additional_conditions:
        times["resolution"] = TensorSpec((2,), dtype="float32")
        times["aspect_ratio"] = TensorSpec((1,), dtype="float32")
    fields = {
        **times,
        "context": TensorSpec((config.caption_length, config.caption_channels)),
        "context_mask": TensorSpec((config.caption_length,), dtype="int64"),
    }
    modulation = {
        "t6": TensorSpec((6 * config.dim,)),
        "embedded_timestep": TensorSpec((config.dim,)),
    }
    caption = {"caption": TensorSpec((config.caption_length, config.dim), batch_dim=1)}

    def build(kind: str) -> Callable[[LayerContext], Any]:
        return functools.partial(_build, config, kind)

    def embedder(
        layer: str, kind: str, provides: dict[str, TensorSpec], uses: tuple[str, ...]
    ) -> Layer:
        return Layer(
            layer, build(kind), (image,), (image,), provides=provides, uses=uses, embedder=True
        )

    layers = [
        embedder("adaln_single", "AdalnSingle", modulation, (*times,)),
        embedder("caption_projection", "CaptionProjection", caption, ("context",)),
        Layer("pos_embed", build("PatchLayer"), (image,), (tokens,)),
    ]
    for i in range(config.num_layers):
        for part, kind, uses in (
            ("attn1", "SelfAttention", ("t6",)),
            ("attn2", "CrossAttention", ("caption", "context_mask")),
            ("ff", "FeedForward", ("t6",)),
        ):
            block = f"transformer_blocks.{i}.{part}"
            layers.append(Layer(block, build(kind), (tokens,), (tokens,), uses=uses))
    head = Layer("head", build("Head"), (tokens,), (prediction,), uses=("embedded_timestep",))
    return Backbone(name, (*layers, head), fields)


def _build(config: PixArtConfig, kind: str, context: LayerContext) -> Any:
    """The module of class ``kind``, sized by ``config``."""
    from model_specs.modules import pixart

    return getattr(pixart, kind)(config, context)


_REQUIRED = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "upcast_attention": False,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_type": "default",
}


def published(config: PixArtConfig) -> Published:
    """As diffusers stores it: its sample_size is what positions are spaced for.

    The caption's length is not part of it.
    """
    settings = {
        **{
            key: value
            for key, value in vars(config).items()
            if key not in ("caption_length", "base_sample_size")
        },
        "sample_size": config.base_size,
        "interpolation_scale": (
            None if config.position_scale == config.usual_scale else config.position_scale
        ),
        "cross_attention_dim": config.dim,
        **_REQUIRED,
    }
    per_head = PerHead(config.num_attention_heads)
    rules = (
        Rule("head.*", "*"),
        Rule(
            ("*.attn1.scale_shift_table", "*.ff.scale_shift_table"),
            "*.scale_shift_table",
            Joined((3, 3)),
        ),
        Rule("*.attention.linear_qkv.*", ("*.to_q.*", "*.to_k.*", "*.to_v.*"), per_head),
        Rule("*.attention.linear_q.*", "*.to_q.*"),
        Rule("*.attention.linear_kv.*", ("*.to_k.*", "*.to_v.*"), per_head),
        Rule("*.attention.linear_proj.*", "*.to_out.0.*"),
        Rule("*.mlp.linear_fc1.*", "*.net.0.proj.*"),
        Rule("*.mlp.linear_fc2.*", "*.net.2.*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> PixArtConfig:
    """The sizes in a ``config.json``; ValueError lists the settings that are not implemented.

    ``caption_length`` is not in it: 120 with additional conditions (alpha's), else 300 (sigma's).
    """
    sizes = {key: config.get(key, value) for key, value in vars(PixArtConfig()).items()}
    if sizes["out_channels"] is None:
        sizes["out_channels"] = sizes["in_channels"]
    if config.get("use_additional_conditions") is None:
        sizes["use_additional_conditions"] = sizes["sample_size"] == 128
    sizes["caption_length"] = 120 if sizes["use_additional_conditions"] else 300
    ours = PixArtConfig(**sizes)
    unprojected = "caption_channels is None, only captions that are projected are implemented"
    require_settings(
        {"cross_attention_dim": 1152, **config},
        {**_REQUIRED, "cross_attention_dim": ours.dim},
        [unprojected] if config.get("caption_channels") is None else [],
    )
    return ours
