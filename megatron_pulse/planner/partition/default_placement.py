"""Default placement of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pulse.planner.layout.crossing import SkipEnds
from megatron_pulse.planner.layout.layouts import default_layout
from megatron_pulse.planner.layout.placement import SEQUENTIAL, PlacementKind
from megatron_pulse.planner.partition.legal_cuts import largest_fold


@dataclass(frozen=True)
class DefaultPlacement:
    """A kind of placement, and the reason for it (``why``)."""

    kind: PlacementKind
    why: str


def default_placement(
    num_layers: int, skips: Sequence[SkipEnds], collocate: bool
) -> DefaultPlacement:
    """A fold if there are skips that it can collocate, else sequential.

    With ``collocate`` both ends of every skip must be on one device, which is impossible for some
    skips that cross.
    """
    kind = default_layout(bool(skips)).kind
    if not skips:
        return DefaultPlacement(kind, "no skips, which a fold is for")
    count = f"{len(skips)} skip{'s' * (len(skips) > 1)}"
    if not collocate:
        return DefaultPlacement(kind, f"{count}, most of which a fold keeps on their devices")
    if largest_fold(num_layers, skips) < 2:
        return DefaultPlacement(SEQUENTIAL, f"{count}, which no fold keeps on their devices")
    return DefaultPlacement(kind, f"{count}, both ends of each on one device")
