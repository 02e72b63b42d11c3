"""The UNet of Stable Diffusion at any size (Rombach et al., CVPR 2022; diffusers' structure).

A cut between layers is one image-like tensor: a resnet and the transformer behind it are one
layer. The timestep embedding is conditioning that ``time_embedding`` computes for every resnet.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a UNet; per-level tuples go from the full resolution down.

    ``transformer_depth`` is the number of transformer blocks behind each resnet of a level (0: no
    attention). ``num_heads`` is per level, or one number for all. Without ``cross_attention_dim``
    transformer blocks have self-attention only. ``num_classes`` > 0 adds a class embedding to
    the timestep embedding; class ``num_classes`` is the null class of classifier-free guidance.
    """

    sample_size: int = 64
    in_channels: int = 4
    out_channels: int = 4
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    transformer_depth: tuple[int, ...] = (1, 1, 1, 0)
    mid_transformer_depth: int = 1
    num_heads: tuple[int, ...] = (8,)
    cross_attention_dim: int | None = 768
    context_length: int = 77
    norm_num_groups: int = 32
    use_linear_projection: bool = False
    num_classes: int = 0

    @property
    def num_levels(self) -> int:
        """Number of resolutions."""
        return len(self.block_out_channels)

    @property
    def temb_dim(self) -> int:
        """Width of the timestep embedding."""
        return 4 * self.block_out_channels[0]

    def heads(self, level: int) -> int:
        """Attention heads at a level."""
        return self.num_heads[level if len(self.num_heads) > 1 else 0]

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        found = [
            f"{key}: must be at least {least}, is {getattr(self, key)}"
            for least, keys in (
                (1, ("sample_size", "in_channels", "out_channels", "layers_per_block")),
                (1, ("context_length", "norm_num_groups")),
                (0, ("mid_transformer_depth", "num_classes")),
            )
            for key in keys
            if getattr(self, key) < least
        ]
        if self.cross_attention_dim is not None and self.cross_attention_dim < 1:
            found.append(
                f"cross_attention_dim: must be positive or none, is {self.cross_attention_dim}"
            )
        for key, least in (("block_out_channels", 1), ("transformer_depth", 0), ("num_heads", 1)):
            values = getattr(self, key)
            if not values or min(values) < least:
                found.append(f"{key}: every value must be at least {least}, is {values}")
        if len(self.transformer_depth) != self.num_levels:
            found.append(
                f"transformer_depth: needs one value for each of the {self.num_levels} levels, "
                f"is {self.transformer_depth}"
            )
        if len(self.num_heads) not in (1, self.num_levels):
            found.append(
                f"num_heads: needs one value, or one for each of the {self.num_levels} levels, "
                f"is {self.num_heads}"
            )
        return found or [*self._divisibility()]

    def _divisibility(self) -> list[str]:
        factor = 2 ** (self.num_levels - 1)
        found = []
        if self.sample_size % factor:
            found.append(
                f"sample_size: must be divisible by {factor} ({self.num_levels} levels), "
                f"is {self.sample_size}"
            )
        if self.block_out_channels[0] % 2:
            found.append(
                f"block_out_channels: the first must be even, is {self.block_out_channels[0]}"
            )
        for level, channels in enumerate(self.block_out_channels):
            if channels % self.norm_num_groups:
                found.append(
                    f"block_out_channels: {channels} of level {level} is not divisible by "
                    f"norm_num_groups={self.norm_num_groups}"
                )
            depth = self.transformer_depth[level]
            if level == self.num_levels - 1:
                depth += self.mid_transformer_depth
            if depth and channels % self.heads(level):
                found.append(
                    f"num_heads: {channels} channels of level {level} are not divisible by "
                    f"{self.heads(level)} heads"
                )
        return found


# Sizes as in the published config.json files of runwayml/stable-diffusion-v1-5 and
# stabilityai/stable-diffusion-2-1 (whose "attention_head_dim" is the number of heads).
CONFIGS: dict[str, UNetConfig] = {
    "unet-tiny": UNetConfig(
        sample_size=28,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        transformer_depth=(0, 1),
        num_heads=(4,),
        cross_attention_dim=None,
        norm_num_groups=8,
        num_classes=10,
    ),
    "unet-sd-tiny": UNetConfig(
        sample_size=16,
        block_out_channels=(32, 64, 128, 128),
        num_heads=(4,),
        cross_attention_dim=32,
        norm_num_groups=8,
    ),
    "unet-sd": UNetConfig(),
    "unet-sd2": UNetConfig(
        num_heads=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True
    ),
}


def build_backbone(name: str, config: UNetConfig) -> Backbone:
    """The chain of SD's units; skips are named after the layer that pushes them."""
    fields = {"timesteps": TensorSpec((), dtype="float32")}
    if config.num_classes:
        fields["labels"] = TensorSpec((), dtype="int64")
    if _uses_context(config):
        assert config.cross_attention_dim is not None
        fields["context"] = TensorSpec((config.context_length, config.cross_attention_dim))
    return Backbone(name, _Chain(config).layers(), fields)


def _uses_context(config: UNetConfig) -> bool:
    depths = (*config.transformer_depth, config.mid_transformer_depth)
    return config.cross_attention_dim is not None and any(depths)


class _Chain:
    """Appends layers one after the other, keeping the current tensor and the stack of skips."""

    def __init__(self, config: UNetConfig) -> None:
        self.config = config
        self.current = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
        self.stack: list[tuple[str, TensorSpec]] = []
        self.done: list[Layer] = []

    def layers(self) -> tuple[Layer, ...]:
        """The whole chain, in diffusers' order."""
        config = self.config
        channels, last = config.block_out_channels, config.num_levels - 1
        temb = {"temb": TensorSpec((config.temb_dim,))}
        uses = ("timesteps", "labels") if config.num_classes else ("timesteps",)
        size = self.current.shape
        self._add("time_embedding", "TimeEmbedding", size, uses=uses, provides=temb)
        self._add("conv_in", "ConvIn", (channels[0], *size[1:]), push=True)
        for level in range(config.num_levels):
            for j in range(config.layers_per_block):
                depth = config.transformer_depth[level]
                self._resnet(f"down_blocks.{level}.layers.{j}", level, depth, push=True)
            if level < last:
                self._resample(f"down_blocks.{level}.downsamplers.0", "Downsample", 0.5, push=True)
        self._resnet("mid_block.layers.0", last, config.mid_transformer_depth)
        self._resnet("mid_block.layers.1", last, 0)
        for i, level in enumerate(reversed(range(config.num_levels))):
            for j in range(config.layers_per_block + 1):
                depth = config.transformer_depth[level]
                self._resnet(f"up_blocks.{i}.layers.{j}", level, depth, pop=True)
            if level > 0:
                self._resample(f"up_blocks.{i}.upsamplers.0", "Upsample", 2)
        self._add("conv_out", "ConvOut", (config.out_channels, *size[1:]))
        return tuple(self.done)

    def _resnet(
        self, name: str, level: int, depth: int, push: bool = False, pop: bool = False
    ) -> None:
        shape = (self.config.block_out_channels[level], *self.current.shape[1:])
        cross = depth > 0 and self.config.cross_attention_dim is not None
        uses = ("temb", "context") if cross else ("temb",)
        arguments = {"level": level, "depth": depth}
        self._add(name, "ResnetLayer", shape, arguments, push, pop, uses)

    def _resample(self, name: str, kind: str, factor: float, push: bool = False) -> None:
        channels, height, width = self.current.shape
        self._add(name, kind, (channels, int(height * factor), int(width * factor)), push=push)

    def _add(
        self,
        name: str,
        kind: str,
        shape: tuple[int, ...],
        arguments: Mapping[str, Any] | None = None,
        push: bool = False,
        pop: bool = False,
        uses: tuple[str, ...] = (),
        provides: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        pops = dict([self.stack.pop()]) if pop else {}
        output = TensorSpec(shape)
        channels = {"in_channels": self.current.shape[0], "out_channels": shape[0]}
        sizes: dict[str, Any] = {**channels, **(arguments or {})}
        for skip, spec in pops.items():
            sizes["pop"] = skip
            sizes["in_channels"] += spec.shape[0]
        build = functools.partial(_build, kind, self.config, sizes)
        self.done.append(
            Layer(
                name,
                build,
                (self.current,),
                (output,),
                pushes={name: 0} if push else {},
                pops=pops,
                provides=provides or {},
                uses=uses,
            )
        )
        if push:
            self.stack.append((name, output))
        self.current = output


def _build(
    kind: str, config: UNetConfig, arguments: Mapping[str, Any], context: LayerContext
) -> Any:
    """The module of class ``kind``, sized by ``config`` and ``arguments``."""
    from model_specs.modules import unet

    return getattr(unet, kind)(config, context, **arguments)
