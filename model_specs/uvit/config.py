"""U-ViT's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from model_specs.common.config_faults import below, indivisible
from model_specs.common.options import fixed
from model_specs.common.sample_sizes import BUCKETS, PATCHWISE

_LEARNED = "positions are learned, one per token"


@dataclass(frozen=True)
class UViTConfig:
    """Sizes of a U-ViT; ``image_size`` is the side of its input (usually latents).

    ``num_classes`` = 0 is unconditional. Otherwise class ``num_classes`` is the null class of
    classifier-free guidance. ``context_length`` text tokens of width ``context_dim`` (0: none)
    replace the class. With ``final_conv`` the head ends with a 3x3 convolution.
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
    UNSUPPORTED = MappingProxyType(
        {
            BUCKETS: f"{_LEARNED}, for squares of image_size. Give image_size, or use another "
            "family",
            PATCHWISE: f"{_LEARNED}, for whole samples. Train a UNet, DiT, PixArt or SD3",
        }
    )

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        sizes = "embed_dim", "num_heads", "mlp_ratio", "image_size", "patch_size", "in_channels"
        if found := below(self, 1, *sizes):
            return found
        if self.depth < 2 or self.depth % 2:
            found.append(f"depth: must be even and at least 2, is {self.depth}")
        if self.embed_dim % self.num_heads or self.embed_dim % 2:
            found.append(
                f"embed_dim: must be even and divisible by num_heads={self.num_heads}, "
                f"is {self.embed_dim}"
            )
        found += indivisible(self, image_size="patch_size")
        found += below(self, 0, "num_classes", "context_length", "context_dim")
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
        """Number of tokens before the patches: time, and the class label or the text if present."""
        return 1 + bool(self.num_classes) + self.context_length

    @property
    def sequence_length(self) -> int:
        """Number of all tokens: extra tokens and patches."""
        return self.num_extra_tokens + (self.image_size // self.patch_size) ** 2


# uvit-s to uvit-h: Table 1 of the paper; depth is its number of layers minus the mid block.
# uvit-s-coco: the text-to-image model of the paper (77 CLIP states). uvit-0.5b is uvit-h by its
# size. Larger ones are scaled by us: heads of 64 features, a width that is a multiple of 512. Their
# depth gives the number of parameters, about (13 depth + 12) embed_dim^2.
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
