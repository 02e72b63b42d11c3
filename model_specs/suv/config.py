"""SUV's sizes and named configurations. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from megatron_pulse.errors import Faults, faults_in
from model_specs.common.config_faults import below
from model_specs.common.options import run_choice
from model_specs.common.sample_sizes import BUCKETS, PATCHWISE, ROTARY, SAMPLES_ARE, parse_buckets

_ANY_SIZE = "positions count frames, rows and columns of any size"
_SIDES = ("frames", "height", "width")


@dataclass(frozen=True)
class SUVConfig:
    """Sizes of an SUV. Videos have ``frames``, ``height`` and ``width`` of the latent.

    Group g has ``num_layers[g]`` blocks, whose attention has the sparsity ``sparse_n[g]``. With
    ``double_ff`` each stream has an MLP, otherwise both share one. With ``norm_skips`` a skip and
    the tokens that it joins are normalised.
    """

    num_layers: tuple[int, ...] = (2, 4, 6, 8, 6, 4, 2)
    sparse_n: tuple[int, ...] = (1, 2, 4, 8, 4, 2, 1)
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    in_channels: int = 32
    patch_size: int = 2
    timestep_embed_dim: int = 1024
    caption_channels: int = 2048
    pooled_projection_dim: int = 1280
    double_ff: bool = True
    norm_skips: bool = False
    frames: int = run_choice(16, _ANY_SIZE)
    height: int = run_choice(72, _ANY_SIZE)
    width: int = run_choice(128, _ANY_SIZE)
    buckets: str = run_choice("", SAMPLES_ARE)
    context_length: int = run_choice(512, "text has no positions")
    UNSUPPORTED = MappingProxyType({PATCHWISE: ROTARY})

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def num_skips(self) -> int:
        """Number of groups before the middle, which pass a skip each."""
        return len(self.num_layers) // 2

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """(frames, height, width) of each shape of samples; Faults for malformed ``buckets``."""
        if not self.buckets:
            return ((self.frames, self.height, self.width),)
        return tuple(parse_buckets(self.buckets, _SIDES, least=len(_SIDES)))

    @property
    def sizes_text(self) -> str:
        """``sizes`` in words."""
        return ", ".join("x".join(map(str, size)) for size in self.sizes)

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """Frames, rows and columns of patches of each shape of samples."""
        patch = self.patch_size
        return tuple((f, height // patch, width // patch) for f, height, width in self.sizes)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Number of patches of each shape of samples."""
        return tuple(map(math.prod, self.grids))

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        if found := below(self, 1):
            return found
        groups = len(self.num_layers)
        if groups % 2 == 0 or len(self.sparse_n) != groups:
            found.append(
                "num_layers, sparse_n: must have the same odd number of groups, have "
                f"{groups} and {len(self.sparse_n)}"
            )
        if any(count < 1 for count in (*self.num_layers, *self.sparse_n)):
            found.append("num_layers, sparse_n: must be at least 1 in every group")
        blocks = zip(self.num_layers, self.sparse_n, strict=False)
        if any(count % 2 for count, n in blocks if n > 1):
            found.append(
                "num_layers: groups with a sparsity must have an even number of blocks, which "
                f"alternate single skip and group skip, are {self.num_layers}"
            )
        if self.attention_head_dim % 16:
            found.append(
                "attention_head_dim: must be divisible by 16, of which 4 features rotate with the "
                f"frame, 6 with the row and 6 with the column; is {self.attention_head_dim}"
            )
        if self.timestep_embed_dim % 2:
            found.append(f"timestep_embed_dim: must be even, is {self.timestep_embed_dim}")
        return found or self._size_faults()

    def _size_faults(self) -> list[str]:
        try:
            sizes = self.sizes
        except Faults as error:
            return faults_in(error)
        option, patch = BUCKETS if self.buckets else "height, width", self.patch_size
        if uneven := [size for size in sizes if any(side % patch for side in size[1:])]:
            return [
                f"{option}: sides must be divisible by patch_size={patch}; a sample of height "
                f"{height} and width {width} is not"
                for _, height, width in uneven
            ]
        least = max(self.sparse_n) ** 2
        option = BUCKETS if self.buckets else "frames, height, width"
        return [
            f"{option}: a sparsity of {max(self.sparse_n)} needs {least} tokens (its square), a "
            f"sample of {'x'.join(map(str, size))} has {count}"
            for size, count in zip(sizes, self.token_counts, strict=True)
            if count < least
        ]


# suv-8.5b: the released model (MindSpeed-MM's model_opensoraplan1_5.json), at 121 frames of
# 576 x 1024 pixels. suv-6b and suv-13b: OpenSoraT2V_v1_5_6B_122 and _13B_122 of Open-Sora Plan.
CONFIGS: dict[str, SUVConfig] = {
    "suv-8.5b": SUVConfig(),
    "suv-6b": SUVConfig(double_ff=False, norm_skips=True),
    "suv-13b": SUVConfig(
        num_layers=(2, 6, 8, 8, 8, 6, 2),
        num_attention_heads=32,
        timestep_embed_dim=1536,
        double_ff=False,
        norm_skips=True,
    ),
    "suv-tiny": SUVConfig(
        num_layers=(2, 2, 2, 2, 2),
        sparse_n=(1, 2, 4, 2, 1),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        timestep_embed_dim=24,
        caption_channels=12,
        pooled_projection_dim=20,
        frames=2,
        height=8,
        width=8,
        context_length=6,
    ),
}
