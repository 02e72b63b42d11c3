"""U-ViT: a ViT on latents with long skips (Bao et al., CVPR 2023, arXiv:2209.12152).

Depth d is d/2 in-blocks, one mid block and d/2 out-blocks; out-block i takes the output of
in-block d/2-1-i. Time, class and text are tokens of the sequence: no conditioning leaves ``embed``.
A block is two layers, attention and MLP.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import FusedPerHead, Published, Rule
from model_specs._options import fixed

_LEARNED = "positions are learned, one for each token"


@dataclass(frozen=True)
class UViTConfig:
    """Sizes of a U-ViT; ``image_size`` is the side of what it sees (of the latent, usually).

    ``num_classes`` = 0 is unconditional; otherwise class ``num_classes`` is the null class of
    classifier-free guidance. ``context_length`` text tokens of width ``context_dim`` (0: none)
    take the place of the class. ``final_conv``: whether the head ends with a 3x3 convolution.
    """

    embed_dim: int = 512
    depth: int = 12
    num_heads: int = 8
    mlp_ratio: int = 4
    image_size: int = fixed(32, _LEARNED)
    patch_size: int = 2
    in_channels: int = 4
    num_classes: int = 1000
    context_length: int = fixed(0, _LEARNED)
    context_dim: int = 0
    final_conv: bool = True

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least 1, is {getattr(self, key)}"
            for key in (
                "embed_dim", "num_heads", "mlp_ratio", "image_size", "patch_size", "in_channels"
            )
            if getattr(self, key) < 1
        ]  # fmt: skip
        if found:
            return found
        if self.depth < 2 or self.depth % 2:
            found.append(f"depth: must be even and at least 2, is {self.depth}")
        if self.embed_dim % self.num_heads or self.embed_dim % 2:
            found.append(
                f"embed_dim: must be even and divisible by num_heads={self.num_heads}, "
                f"is {self.embed_dim}"
            )
        if self.image_size % self.patch_size:
            found.append(
                f"image_size: must be divisible by patch_size={self.patch_size}, "
                f"is {self.image_size}"
            )
        found += [
            f"{key}: must not be negative, is {getattr(self, key)}"
            for key in ("num_classes", "context_length", "context_dim")
            if getattr(self, key) < 0
        ]
        if (self.context_length > 0) != (self.context_dim > 0):
            found.append(
                "context_length, context_dim: both must be positive or both 0, are "
                f"{self.context_length} and {self.context_dim}"
            )
        if self.context_length > 0 and self.num_classes > 0:
            found.append(f"num_classes: must be 0 beside text tokens, is {self.num_classes}")
        return found

    @property
    def num_extra_tokens(self) -> int:
        """Tokens before the patches: time, and the class label or the text if there is one."""
        return 1 + bool(self.num_classes) + self.context_length

    @property
    def sequence_length(self) -> int:
        """All tokens: extras and patches."""
        return self.num_extra_tokens + (self.image_size // self.patch_size) ** 2


# uvit-s to uvit-h: Table 1 of the paper; depth is its number of layers minus the mid block.
# uvit-s-coco: the text-to-image model of the paper (77 CLIP states). uvit-0.5b is uvit-h by its
# size. Those above it are scaled by us: heads of 64 features, a width that is a multiple of 512,
# and the depth that gives the number of parameters, about (13 depth + 12) embed_dim^2.
CONFIGS: dict[str, UViTConfig] = {
    "uvit-tiny": UViTConfig(64, depth=4, num_heads=4, image_size=8, num_classes=10),
    "uvit-s": UViTConfig(512, depth=12, num_heads=8),
    "uvit-s-deep": UViTConfig(512, depth=16, num_heads=8),
    "uvit-m": UViTConfig(768, depth=16, num_heads=12),
    "uvit-l": UViTConfig(1024, depth=20, num_heads=16),
    "uvit-h": UViTConfig(1152, depth=28, num_heads=16, final_conv=False),
    "uvit-s-coco": UViTConfig(
        512, depth=12, num_heads=8, num_classes=0, context_length=77, context_dim=768
    ),
    "uvit-0.5b": UViTConfig(1152, depth=28, num_heads=16, final_conv=False),
    "uvit-1.4b": UViTConfig(1536, depth=44, num_heads=24),
    "uvit-2.7b": UViTConfig(2048, depth=48, num_heads=32),
    "uvit-6.0b": UViTConfig(3072, depth=48, num_heads=48),
}


def published(config: UViTConfig) -> Published:
    """The names of the authors' code, github.com/baofff/U-ViT; it has no ``config.json``."""
    rules = (
        Rule("embed.patch_embed.*", "patch_embed.proj.*"),
        Rule("embed.*", "*"),
        Rule("head.*", "*"),
        Rule(
            "*.attn.attention.linear_qkv.weight",
            "*.attn.qkv.weight",
            FusedPerHead(config.num_heads),
        ),
        Rule("*.attn.attention.linear_proj.*", "*.attn.proj.*"),
        Rule("*.attn.*", "*.*"),
        Rule("*.mlp.mlp.linear_fc*", "*.mlp.fc*"),
        Rule("*.mlp.*", "*.*"),
    )
    return Published("U-ViT", "UViT", {}, rules)


def build_backbone(name: str, config: UViTConfig) -> Backbone:
    """The chain ``embed``, ``in_blocks.*``, ``mid_block.*``, ``out_blocks.*``, ``head``.

    Each block is ``<block>.attn`` (with what takes the skip before it) and ``<block>.mlp``.
    """
    image = TensorSpec((config.in_channels, config.image_size, config.image_size))
    tokens = TensorSpec((config.sequence_length, config.embed_dim), batch_dim=1, sequence=True)
    half = config.depth // 2
    fields = {"timesteps": TensorSpec((), dtype="float32")}
    if config.num_classes:
        fields["labels"] = TensorSpec((), dtype="int64")
    if config.context_length:
        fields["context"] = TensorSpec((config.context_length, config.context_dim))

    def block(block_name: str, push: str | None = None, pop: str | None = None) -> list[Layer]:
        attention = Layer(
            f"{block_name}.attn",
            functools.partial(_build_attention, config, pop),
            (tokens,),
            (tokens,),
            pops={pop: tokens} if pop else {},
        )
        mlp = Layer(
            f"{block_name}.mlp",
            functools.partial(_build_mlp, config),
            (tokens,),
            (tokens,),
            pushes={push: 0} if push else {},
        )
        return [attention, mlp]

    embed = functools.partial(_build_embed, config)
    layers = [Layer("embed", embed, (image,), (tokens,), uses=(*fields,))]
    for i in range(half):
        layers += block(f"in_blocks.{i}", push=f"in_blocks.{i}")
    layers += block("mid_block")
    for i in range(half):
        layers += block(f"out_blocks.{i}", pop=f"in_blocks.{half - 1 - i}")
    layers.append(Layer("head", functools.partial(_build_head, config), (tokens,), (image,)))
    return Backbone(name, tuple(layers), fields)


def _build_embed(config: UViTConfig, context: LayerContext) -> Any:
    from model_specs.modules.uvit import Embed

    return Embed(config, context)


def _build_attention(config: UViTConfig, pop: str | None, context: LayerContext) -> Any:
    from model_specs.modules.uvit import build_attention

    return build_attention(config, pop, context)


def _build_mlp(config: UViTConfig, context: LayerContext) -> Any:
    from model_specs.modules.uvit import build_mlp

    return build_mlp(config, context)


def _build_head(config: UViTConfig, context: LayerContext) -> Any:
    from model_specs.modules.uvit import Head

    return Head(config, context)
