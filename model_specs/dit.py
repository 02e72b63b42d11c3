"""DiT: a class-conditional transformer on latents (Peebles and Xie, ICCV 2023, arXiv:2212.09748).

Structure of diffusers' ``DiTTransformer2DModel``, where every block embeds timestep and class for
itself, and the head uses what block 0 embeds. A block is two layers; the three modulation vectors
that its feed-forward needs travel from one to the other. There are no long skips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import PerHead, Published, Rule
from model_specs._options import RESPACED, run_choice, settled_by
from model_specs._published import require_settings

PUBLISHED_AS = "DiTTransformer2DModel"


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a DiT; ``sample_size`` is the side of what it sees (of the latent, usually).

    Positions span what ``base_sample_size`` has patches (None: ``sample_size``), as in a published
    model that is given another size than its own. Class ``num_classes`` is the null class of
    classifier-free guidance. With learned variances ``out_channels`` is twice ``in_channels``:
    noise first, then variance.
    """

    num_layers: int = 28
    num_attention_heads: int = 16
    attention_head_dim: int = 72
    sample_size: int = run_choice(32, RESPACED)
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    num_classes: int = 1000
    base_sample_size: int | None = settled_by("base_size")

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least 1, is {value}"
            for key, value in vars(self).items()
            if value is not None and value < 1
        ]
        if found:
            return found
        if self.dim % 4:
            found.append(
                "attention_head_dim: num_attention_heads * attention_head_dim must be divisible "
                f"by 4, is {self.dim}"
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


# dit-xl-2: facebook/DiT-XL-2-256; at 512 px sample_size is 64.
CONFIGS: dict[str, DiTConfig] = {
    "dit-xl-2": DiTConfig(),
    "dit-tiny": DiTConfig(
        num_layers=2, num_attention_heads=4, attention_head_dim=8, sample_size=8, num_classes=10
    ),
}


def build_backbone(name: str, config: DiTConfig) -> Backbone:
    """The chain ``embedding``, ``pos_embed``, ``transformer_blocks.*.{attn1,ff}``, ``head``."""
    image = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
    prediction = TensorSpec((config.out_channels, config.sample_size, config.sample_size))
    tokens = TensorSpec((config.side**2, config.dim), batch_dim=1, sequence=True)
    modulation = TensorSpec((3 * config.dim,))
    fields = {"timesteps": TensorSpec((), dtype="float32"), "labels": TensorSpec((), dtype="int64")}

    def build(kind: str, **arguments: Any) -> Callable[[LayerContext], Any]:
        return functools.partial(_build, config, kind, arguments)

    layers = [
        Layer(
            "embedding",
            build("Embedding"),
            (image,),
            (image,),
            provides={"temb0": TensorSpec((config.dim,))},
            uses=(*fields,),
            embedder=True,
        ),
        Layer("pos_embed", build("PatchLayer"), (image,), (tokens,)),
    ]
    for i in range(config.num_layers):
        block, first = f"transformer_blocks.{i}", i == 0
        attention = build("Attention", own_embedder=not first)
        uses = ("temb0",) if first else (*fields,)
        layers += [
            Layer(f"{block}.attn1", attention, (tokens,), (tokens, modulation), uses=uses),
            Layer(f"{block}.ff", build("FeedForward"), (tokens, modulation), (tokens,)),
        ]
    layers.append(Layer("head", build("Head"), (tokens,), (prediction,), uses=("temb0",)))
    return Backbone(name, tuple(layers), fields)


def _build(
    config: DiTConfig, kind: str, arguments: Mapping[str, Any], context: LayerContext
) -> Any:
    """The module of class ``kind``, sized by ``config`` and ``arguments``."""
    from model_specs.modules import dit

    return getattr(dit, kind)(config, context, **arguments)


_REQUIRED = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "upcast_attention": False,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-5,
}


def published(config: DiTConfig) -> Published:
    """As diffusers stores it: its sample_size is what positions are spaced for."""
    settings = {
        **{
            key: value
            for key, value in vars(config).items()
            if key not in ("num_classes", "base_sample_size")
        },
        "sample_size": config.base_size,
        "num_embeds_ada_norm": config.num_classes,
        **_REQUIRED,
    }
    rules = (
        Rule("embedding.emb.*", "transformer_blocks.0.norm1.emb.*"),
        Rule("*.attn1.emb.*", "*.norm1.emb.*"),
        Rule("*.attn1.modulation.*", "*.norm1.linear.*"),
        Rule(
            "*.attn1.attention.linear_qkv.*",
            ("*.attn1.to_q.*", "*.attn1.to_k.*", "*.attn1.to_v.*"),
            PerHead(config.num_attention_heads),
        ),
        Rule("*.attn1.attention.linear_proj.*", "*.attn1.to_out.0.*"),
        Rule("*.ff.mlp.linear_fc1.*", "*.ff.net.0.proj.*"),
        Rule("*.ff.mlp.linear_fc2.*", "*.ff.net.2.*"),
        Rule("head.*", "*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> DiTConfig:
    """The sizes in a ``config.json``; ValueError lists the settings that are not implemented."""
    require_settings(config, _REQUIRED)
    sizes = {
        key: config[key]
        for key in vars(DiTConfig())
        if key in config and key not in ("num_classes", "out_channels")
    }
    channels = config.get("out_channels")
    return DiTConfig(
        **sizes,
        num_classes=config.get("num_embeds_ada_norm", 1000),
        out_channels=config.get("in_channels", 4) if channels is None else channels,
    )
