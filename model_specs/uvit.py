"""U-ViT: a ViT on latents with long skips (Bao et al., CVPR 2023, arXiv:2209.12152).

Depth d is d/2 in-blocks, one mid block and d/2 out-blocks; out-block i takes the output of
in-block d/2-1-i. Time and class are tokens of the sequence, so no conditioning leaves ``embed``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext


@dataclass(frozen=True)
class UViTConfig:
    """Sizes of a U-ViT; ``image_size`` is the side of what it sees (of the latent, usually).

    ``num_classes`` = 0 is unconditional; otherwise class ``num_classes`` is the null class of
    classifier-free guidance.
    """

    embed_dim: int = 512
    depth: int = 12
    num_heads: int = 8
    mlp_ratio: int = 4
    image_size: int = 32
    patch_size: int = 2
    in_channels: int = 4
    num_classes: int = 1000

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
        if self.num_classes < 0:
            found.append(f"num_classes: must not be negative, is {self.num_classes}")
        return found

    @property
    def num_extra_tokens(self) -> int:
        """Tokens before the patches: time, and the class label if there is one."""
        return 2 if self.num_classes else 1

    @property
    def sequence_length(self) -> int:
        """All tokens: extras and patches."""
        return self.num_extra_tokens + (self.image_size // self.patch_size) ** 2


# Table 1 of the paper; depth is the paper's number of layers minus the mid block.
CONFIGS: dict[str, UViTConfig] = {
    "uvit-tiny": UViTConfig(64, depth=4, num_heads=4, image_size=8, num_classes=10),
    "uvit-s": UViTConfig(512, depth=12, num_heads=8),
    "uvit-s-deep": UViTConfig(512, depth=16, num_heads=8),
    "uvit-m": UViTConfig(768, depth=16, num_heads=12),
    "uvit-l": UViTConfig(1024, depth=20, num_heads=16),
    "uvit-h": UViTConfig(1152, depth=28, num_heads=16),
}


def build_backbone(name: str, config: UViTConfig) -> Backbone:
    """The chain ``embed``, ``in_blocks.*``, ``mid_block``, ``out_blocks.*``, ``head``."""
    image = TensorSpec((config.in_channels, config.image_size, config.image_size))
    tokens = TensorSpec((config.sequence_length, config.embed_dim), batch_dim=1)
    half = config.depth // 2
    fields = {"timesteps": TensorSpec((), dtype="float32")}
    if config.num_classes:
        fields["labels"] = TensorSpec((), dtype="int64")

    def block(layer_name: str, push: str | None = None, pop: str | None = None) -> Layer:
        return Layer(
            layer_name,
            functools.partial(_build_block, config, pop),
            (tokens,),
            (tokens,),
            pushes={push: 0} if push else {},
            pops={pop: tokens} if pop else {},
        )

    layers = (
        Layer(
            "embed", functools.partial(_build_embed, config), (image,), (tokens,), uses=(*fields,)
        ),
        *(block(f"in_blocks.{i}", push=f"in_blocks.{i}") for i in range(half)),
        block("mid_block"),
        *(block(f"out_blocks.{i}", pop=f"in_blocks.{half - 1 - i}") for i in range(half)),
        Layer("head", functools.partial(_build_head, config), (tokens,), (image,)),
    )
    return Backbone(name, layers, fields)


def _build_embed(config: UViTConfig, context: LayerContext) -> Any:
    from model_specs.modules.uvit import Embed

    return Embed(config, context)


def _build_block(config: UViTConfig, pop: str | None, context: LayerContext) -> Any:
    from model_specs.modules.uvit import build_block

    return build_block(config, pop, context)


def _build_head(config: UViTConfig, context: LayerContext) -> Any:
    from model_specs.modules.uvit import Head

    return Head(config, context)
