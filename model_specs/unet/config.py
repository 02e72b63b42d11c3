"""UNet's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pulse.backbone.appended_fields import inpaints
from model_specs.common.config_faults import below
from model_specs.common.options import fixed, run_choice
from model_specs.common.sample_sizes import SAMPLES_ARE, SampleSizes


@dataclass(frozen=True)
class UNetConfig(SampleSizes):
    """Sizes of a UNet; per-level tuples go from the full resolution down.

    ``transformer_depth`` is the number of transformer blocks after each resnet of a level (0: no
    attention). ``num_heads`` is per level, or one number for all. Without ``cross_attention_dim``
    transformer blocks have self-attention only. ``num_classes`` > 0 adds a class embedding to the
    timestep embedding. ``null_class`` adds class ``num_classes`` for classifier-free guidance;
    published models have none. ``pooled_dim`` > 0 adds SDXL's embedding of a pooled text vector and
    ``num_time_ids`` numbers. ``channels_last`` is the memory format of convolutions; it changes
    values only by rounding. With ``patchwise``
    two channels of coordinates follow the sample's in ``conv_in``. A model with ``in_channels`` of
    2 ``out_channels`` + 1 inpaints: a mask and a masked picture follow the sample.
    """

    sample_size: int = run_choice(64, "convolutions and attention take any size")
    buckets: str = run_choice("", SAMPLES_ARE)
    patchwise: str = fixed("", "places of patches are two more channels of conv_in")
    in_channels: int = 4
    out_channels: int = 4
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    transformer_depth: tuple[int, ...] = (1, 1, 1, 0)
    mid_transformer_depth: int = 1
    num_heads: tuple[int, ...] = (8,)
    cross_attention_dim: int | None = 768
    context_length: int = run_choice(77, "cross-attention takes texts of any length")
    norm_num_groups: int = 32
    use_linear_projection: bool = False
    num_classes: int = 0
    null_class: bool = True
    pooled_dim: int = 0
    num_time_ids: int = 6
    time_id_dim: int = 256
    channels_last: bool = run_choice(False, "memory layout differs")

    @property
    def num_levels(self) -> int:
        """Number of resolutions."""
        return len(self.block_out_channels)

    @property
    def temb_dim(self) -> int:
        """Width of the timestep embedding."""
        return 4 * self.block_out_channels[0]

    @property
    def inpaints(self) -> bool:
        """True if a mask and a masked picture follow the sample (see ``appended_fields``)."""
        return inpaints(self.in_channels, self.out_channels)

    @property
    def reads_context(self) -> bool:
        """True if any layer has cross-attention."""
        depths = (*self.transformer_depth, self.mid_transformer_depth)
        return self.cross_attention_dim is not None and any(depths)

    def heads(self, level: int) -> int:
        """Attention heads at a level."""
        return self.num_heads[level if len(self.num_heads) > 1 else 0]

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        sizes = "sample_size", "in_channels", "out_channels", "layers_per_block"
        others = "context_length", "norm_num_groups", "num_time_ids"
        found = [
            *below(self, 1, *sizes, *others),
            *below(self, 2, "time_id_dim"),
            *below(self, 0, "mid_transformer_depth", "num_classes", "pooled_dim"),
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
        if self.patchwise and self.inpaints:
            found.append("patchwise: inpainting models take whole pictures")
        return found or [*self._divisibility()]

    def _divisibility(self) -> list[str]:
        factor = 2 ** (self.num_levels - 1)
        found = []
        if self.sample_size % factor:
            found.append(
                f"sample_size: must be divisible by {factor} ({self.num_levels} levels), "
                f"is {self.sample_size}"
            )
        found += self.bucket_faults(factor, f"{factor} ({self.num_levels} levels)")
        if self.block_out_channels[0] % 2:
            found.append(
                f"block_out_channels: the first must be even, is {self.block_out_channels[0]}"
            )
        if self.time_id_dim % 2:
            found.append(f"time_id_dim: must be even, is {self.time_id_dim}")
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


_SD_V2 = UNetConfig(
    sample_size=96, num_heads=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True
)


def _scaled_sd_v2(*widths: int) -> UNetConfig:
    """SD v2 on 32 x 32 latents with heads of 64 features, as in PULSE."""
    heads = tuple(width // 64 for width in widths)
    return replace(_SD_V2, sample_size=32, block_out_channels=widths, num_heads=heads)


# sd-v1.5, sd-v2.1 and sdxl are the published config.json files of runwayml/stable-diffusion-v1-5,
# stabilityai/stable-diffusion-2-1 and stabilityai/stable-diffusion-xl-base-1.0. PULSE names its SD
# v2 models by their parameters and does not give their widths. Ours keep SD v2's blocks. Widths are
# about 1 : 2 : 4 : 4 (0.8b: 1 : 2 : 3 : 3) in multiples of 128, so that the number of heads is
# even. sd-v2.1 itself, with 0.87 B, is not within 3 % of PULSE's 0.8 B.
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
    "sd-tiny": UNetConfig(
        sample_size=16,
        block_out_channels=(32, 64, 128, 128),
        num_heads=(4,),
        cross_attention_dim=32,
        norm_num_groups=8,
    ),
    "sdxl-tiny": UNetConfig(
        sample_size=16,
        block_out_channels=(16, 32, 64),
        transformer_depth=(0, 1, 2),
        mid_transformer_depth=2,
        num_heads=(1, 2, 4),
        cross_attention_dim=32,
        norm_num_groups=8,
        use_linear_projection=True,
        pooled_dim=24,
        time_id_dim=16,
    ),
    "sd-v1.5": UNetConfig(),
    "sd-v2.1": _SD_V2,
    "sd-v2-0.8b": _scaled_sd_v2(384, 768, 1152, 1152),
    "sd-v2-2.5b": _scaled_sd_v2(512, 1152, 2176, 2176),
    "sd-v2-4.6b": _scaled_sd_v2(768, 1536, 2944, 2944),
    "sd-v2-7.2b": _scaled_sd_v2(896, 1920, 3712, 3712),
    "sdxl": UNetConfig(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        transformer_depth=(0, 2, 10),
        mid_transformer_depth=10,
        num_heads=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        pooled_dim=1280,
    ),
}
