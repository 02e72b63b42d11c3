"""Sizes and named configurations of UNets with a control branch. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_specs.common.config_faults import below
from model_specs.unet.config import CONFIGS as UNETS
from model_specs.unet.config import UNetConfig


@dataclass(frozen=True)
class ControlNetConfig(UNetConfig):
    """Sizes of the locked UNet, and of the network that encodes the control image.

    The control image has ``conditioning_channels``. Each of ``conditioning_widths`` but the first
    halves its sides, down to those of the sample.
    """

    conditioning_channels: int = 3
    conditioning_widths: tuple[int, ...] = (16, 32, 96, 256)

    @property
    def conditioning_factor(self) -> int:
        """Height and width of the control image, as multiples of the sample's."""
        return 1 << (len(self.conditioning_widths) - 1)

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        found = [*super().faults(), *below(self, 1, "conditioning_channels")]
        if self.patchwise:
            found.append("patchwise: a control branch copies a UNet without it. Leave it out")
        if not self.conditioning_widths or min(self.conditioning_widths) < 1:
            found.append(
                "conditioning_widths: every value must be at least 1, is "
                f"{self.conditioning_widths}"
            )
        return found


CONFIGS = {
    "controlnet-tiny": ControlNetConfig(
        **vars(UNETS["sd-tiny"]), conditioning_widths=(8, 8, 16, 16)
    ),
    "controlnet-sd-v1.5": ControlNetConfig(**vars(UNETS["sd-v1.5"])),
    "controlnet-sd-v2.1": ControlNetConfig(**vars(UNETS["sd-v2.1"])),
    "controlnet-sdxl": ControlNetConfig(**vars(UNETS["sdxl"])),
}
