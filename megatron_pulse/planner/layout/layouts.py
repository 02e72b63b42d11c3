"""The ways to run a skip model over devices: placements, stages on each, and what skips do.

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
    """What skips between stages do."""

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
    """A kind of placement, the stages on each device, and what skips do.

    ``mode`` is what 'pulse partition' calls it ("": it has no name there).
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
        """What it does, for those who choose."""
        return f"{self.kind.help}; {_HELP[self.skips]}"

    @property
    def collocates(self) -> bool:
        """Whether both ends of every skip must be on one device."""
        return self.skips is Skips.HOME

    @property
    def relays(self) -> bool:
        """Whether skips go through every stage between their ends."""
        return self.skips is Skips.RELAY

    def placement(self, num_devices: int) -> Placement:
        """Which of so many devices hosts which stage."""
        return make_placement(self.kind.name, num_devices, self.num_chunks)

    def with_chunks(self, num_chunks: int) -> Layout:
        """The same with so many stages on each device, or as many of them as it can have."""
        return replace(self, num_chunks=self.kind.most_chunks(num_chunks))

    def relayed(self) -> Layout:
        """The same with relayed skips, for comparison."""
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
"""All that are run, by name; the first is for one device, the others are for more."""


class _Skip(Protocol):
    """A skip edge by the places of its layers."""

    @property
    def source(self) -> int: ...
    @property
    def destination(self) -> int: ...


def layout_name(partition: Partition, skips: Iterable[_Skip]) -> str:
    """The name of what a partition is: one of ``LAYOUTS``, else its placement and stages.

    A fold is exact where both ends of every skip are on one device, and soft otherwise.
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
    """The layouts of a name, or all of a kind of placement; [] if none is called so."""
    if name in LAYOUTS:
        return [LAYOUTS[name]]
    return [each for each in LAYOUTS.values() if each is not WHOLE and each.kind.name == name]


def modes() -> dict[str, Layout]:
    """Those that 'pulse partition' offers, by what it calls them."""
    return {layout.mode: layout for layout in LAYOUTS.values() if layout.mode}


def layout_of(kind: str) -> Layout:
    """A kind of placement with the fewest stages, whose skips go where the cuts leave them."""
    return Layout(kind, PLACEMENTS[kind], PLACEMENTS[kind].least_chunks)


def best_known(has_skips: bool, num_chains: int = 1) -> Layout:
    """What suits a chain with, or without, skips, or a cascade of so many."""
    if num_chains > 1:
        skips = Skips.HOME if has_skips else Skips.DIRECT
        return Layout(OPPOSITE.name, OPPOSITE, OPPOSITE.of_chain * num_chains, skips)
    return FOLD_SOFT if has_skips else ROW
