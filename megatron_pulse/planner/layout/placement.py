"""Which device hosts which stage, and which layers a stage holds.

=============  ==========================  ====================================
placement      P = 3                       stage s is on device
=============  ==========================  ====================================
sequential     0 1 2                       s
interleaved    0 1 2 0 1 2                 s mod P
fold (W = 1)   0 1 2 2 1 0                 s, then mirrored (PULSE, section IV)
fold (W = 2)   0 1 2 2 1 0 0 1 2 2 1 0     the same, once per wave
=============  ==========================  ====================================
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class PlacementKind(StrEnum):
    """How stages are laid over devices."""

    SEQUENTIAL = "sequential"
    INTERLEAVED = "interleaved"
    FOLD = "fold"


@dataclass(frozen=True)
class Placement:
    """``device_of_stage[s]`` is the pipeline device that hosts stage ``s``."""

    kind: PlacementKind
    num_devices: int
    device_of_stage: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages in the chain (virtual stages included)."""
        return len(self.device_of_stage)

    @property
    def num_chunks(self) -> int:
        """Stages per device (Megatron's virtual pipeline size)."""
        return len(self.stages_of_device(0))

    def over(self, num_devices: int) -> Placement:
        """The same kind with as many stages on each of ``num_devices``."""
        return make_placement(self.kind, num_devices, self.num_chunks)

    def stages_of_device(self, device: int) -> tuple[int, ...]:
        """The stages on ``device`` in chain order; the i-th is Megatron's model chunk i."""
        return _stages_of_devices(self)[device]


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


@cache
def _stages_of_devices(placement: Placement) -> tuple[tuple[int, ...], ...]:
    homes = placement.device_of_stage
    devices = range(placement.num_devices)
    return tuple(tuple(s for s, home in enumerate(homes) if home == d) for d in devices)


def sequential(num_devices: int) -> Placement:
    """One stage per device, in order."""
    return Placement(PlacementKind.SEQUENTIAL, num_devices, tuple(range(num_devices)))


def interleaved(num_devices: int, num_chunks: int = 2) -> Placement:
    """``num_chunks`` stages per device, looped (Megatron's virtual pipeline)."""
    return Placement(PlacementKind.INTERLEAVED, num_devices, tuple(range(num_devices)) * num_chunks)


def fold(num_devices: int, num_waves: int = 1) -> Placement:
    """Stages folded over the devices, so that both ends of a nested skip share a device."""
    there = tuple(range(num_devices))
    return Placement(PlacementKind.FOLD, num_devices, (*there, *reversed(there)) * num_waves)


def make_placement(kind: str, num_devices: int, num_chunks: int = 2) -> Placement:
    """The placement of that name; one device always hosts the whole chain as one stage."""
    if num_devices == 1:
        return Placement(PlacementKind(kind), 1, (0,))
    match PlacementKind(kind):
        case PlacementKind.SEQUENTIAL:
            return sequential(num_devices)
        case PlacementKind.INTERLEAVED:
            return interleaved(num_devices, num_chunks)
        case PlacementKind.FOLD:
            return fold(num_devices, num_chunks // 2)
