"""Layouts of a skip model over devices: a placement, stages per device, and the transport of skips.

===================  ==========================================================================
skips                get from their source to their destination
===================  ==========================================================================
home                 on their device: the cuts keep both ends of each on one
direct               once, straight from device to device (torchgpipe's portals)
relay                through every stage between, as torch and Megatron would; not run here
===================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from megatron_pulse.planner.layout.placement import (
    FOLD,
    INTERLEAVED,
    OPPOSITE,
    PLACEMENTS,
    SEQUENTIAL,
    Partition,
    Placement,
    PlacementKind,
    make_placement,
)


class Skips(StrEnum):
    """Transport of skips between stages."""

    HOME = "home"
    DIRECT = "direct"
    RELAY = "relay"


_HELP = {
    Skips.HOME: "both ends of every skip are on one device",
    Skips.DIRECT: "skips travel, directly",
    Skips.RELAY: "skips go from stage to stage",
}


@dataclass(frozen=True, order=True)
class Layout:
    """A kind of placement, the number of stages per device, and the transport of skips.

    ``mode`` is its name in 'pulse partition' ("": not offered there).
    """

    name: str
    kind: PlacementKind = field(compare=False)
    num_chunks: int
    skips: Skips = Skips.DIRECT
    mode: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def help(self) -> str:
        """Description for users."""
        return f"{self.kind.help}; {_HELP[self.skips]}"

    @property
    def collocates(self) -> bool:
        """True if both ends of every skip must be on one device."""
        return self.skips is Skips.HOME

    @property
    def relays(self) -> bool:
        """True if skips go through every stage between their ends."""
        return self.skips is Skips.RELAY

    def placement(self, num_devices: int) -> Placement:
        """Placement of the stages on ``num_devices`` devices."""
        return make_placement(self.kind.name, num_devices, self.num_chunks)

    def with_chunks(self, num_chunks: int) -> Layout:
        """The same layout with ``num_chunks`` stages per device, or the most that it can have up to
        that."""
        return replace(self, num_chunks=self.kind.most_chunks(num_chunks))

    def relayed(self) -> Layout:
        """The same layout with relayed skips, for comparison."""
        return replace(self, name=f"{self.name} relay", skips=Skips.RELAY, mode="")


WHOLE = Layout("one device", SEQUENTIAL, 1)
ROW = Layout("sequential", SEQUENTIAL, 1, mode="sequential")
LOOP = Layout("interleaved", INTERLEAVED, 2, mode="interleaved")
FOLD_EXACT = Layout("fold exact", FOLD, 2, Skips.HOME, mode="exact")
FOLD_SOFT = Layout("fold soft", FOLD, 2, mode="soft")
TWO_WAVES = Layout("two waves", FOLD, 4, Skips.HOME)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (WHOLE, ROW, LOOP, FOLD_EXACT, FOLD_SOFT, TWO_WAVES)
}
"""All layouts that are run, by name. The first is for one device, the others are for several."""


class _Skip(Protocol):
    """A skip, identified by the layers that it connects."""

    @property
    def source(self) -> int: ...
    @property
    def destination(self) -> int: ...


def layout_name(partition: Partition, skips: Iterable[_Skip]) -> str:
    """Name of a partition's layout: one of ``LAYOUTS``, or its placement and number of stages.

    A fold is exact if both ends of every skip are on one device, and soft otherwise.
    """
    placement, at = partition.placement, partition.device_of_layer
    if placement.num_devices == 1:
        return WHOLE.name
    travels = any(at(skip.source) != at(skip.destination) for skip in skips)
    for layout in LAYOUTS.values():
        same = (layout.kind, layout.num_chunks) == (placement.kind, placement.num_chunks)
        if layout is not WHOLE and same and not (travels and layout.collocates):
            return layout.name
    return f"{placement.kind} of {placement.num_stages} stages"


def layouts_called(name: str) -> list[Layout]:
    """Layouts with this name, or all layouts with a placement of this name; [] for an unknown
    name."""
    if name in LAYOUTS:
        return [LAYOUTS[name]]
    return [each for each in LAYOUTS.values() if each is not WHOLE and each.kind.name == name]


def modes() -> dict[str, Layout]:
    """Layouts that 'pulse partition' offers, by their names there."""
    return {layout.mode: layout for layout in LAYOUTS.values() if layout.mode}


def layout_of(kind: str) -> Layout:
    """Layout of a placement with the fewest stages, in which skips travel directly."""
    return Layout(kind, PLACEMENTS[kind], PLACEMENTS[kind].least_chunks)


def default_layout(has_skips: bool, num_chains: int = 1) -> Layout:
    """Default layout of a chain with or without skips, or of a cascade of ``num_chains``."""
    if num_chains > 1:
        skips = Skips.HOME if has_skips else Skips.DIRECT
        return Layout(OPPOSITE.name, OPPOSITE, OPPOSITE.of_chain * num_chains, skips)
    return FOLD_SOFT if has_skips else ROW
