"""Which layers each stage holds, on which device."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megatron_pulse.planner.layout.placement import Placement


@dataclass(frozen=True)
class Partition:
    """Stage ``s`` holds the layers ``cuts[s] <= i < cuts[s + 1]``."""

    placement: Placement
    cuts: tuple[int, ...]

    def layers_of_stage(self, stage: int) -> range:
        """Indices of the layers in ``stage``."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds the layer at index ``layer``."""
        return bisect_right(self.cuts, layer) - 1

    def device_of_layer(self, layer: int) -> int:
        """The device that hosts the layer at index ``layer``."""
        return self.placement.device_of_stage[self.stage_of_layer(layer)]
