"""Placement of stages on devices, and partition of layers into stages.

=============  ==========================  ====================================
placement      P = 3                       stage s is on device
=============  ==========================  ====================================
sequential     0 1 2                       s
interleaved    0 1 2 0 1 2                 s mod P
fold (W = 1)   0 1 2 2 1 0                 s, then mirrored (PULSE, section IV)
fold (W = 2)   0 1 2 2 1 0 0 1 2 2 1 0     the same, once per wave
opposite       0 1 2 2 1 0|2 1 0 0 1 2     a fold of each of a cascade's chains
=============  ==========================  ====================================

``PLACEMENTS`` defines each kind of placement; all other code reads its attributes there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property


@dataclass(frozen=True)
class PlacementKind:
    """Rule that lays stages over devices; kinds are compared by name.

    ``homes(P, V)`` are the devices of the stages if each of P devices hosts V stages. V is
    ``least_chunks`` or more, in steps of ``chunk_step`` (0: never more). ``mirrored`` kinds have
    stage s and its mirror S-1-s on one device, so that nested skips can be collocated. Their cuts
    are searched in pairs of stages (``partition/fold``), the cuts of others stage by stage
    (``partition/row``). ``classics`` are the classic schedules that fit, beside gpipe, which fits
    all. ``auto`` is the schedule that the name "auto" stands for. In a kind for cascades each chain
    has ``of_chain`` stages per device (0: the kind is for one chain). ``help`` is a description for
    users.
    """

    name: str
    help: str = field(compare=False, repr=False)
    homes: Callable[[int, int], tuple[int, ...]] = field(compare=False, repr=False)
    least_chunks: int = field(default=1, compare=False, repr=False)
    chunk_step: int = field(default=0, compare=False, repr=False)
    mirrored: bool = field(default=False, compare=False, repr=False)
    classics: tuple[str, ...] = field(default=(), compare=False, repr=False)
    auto: str = field(default="wave", compare=False, repr=False)
    of_chain: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name

    def allows(self, num_chunks: int) -> bool:
        """True if each device may host ``num_chunks`` stages."""
        more = num_chunks - self.least_chunks
        return more == 0 or (more > 0 and self.chunk_step > 0 and more % self.chunk_step == 0)

    @property
    def chunks(self) -> str:
        """Allowed numbers of stages per device: "1", or for example "2, 4, ..."."""
        least, step = self.least_chunks, self.chunk_step
        return f"{least}, {least + step}, ..." if step else str(least)

    @property
    def keeps_skips(self) -> bool:
        """True if both ends of nested skips can be on one device."""
        return self.mirrored or self.of_chain > 1

    def most_chunks(self, num_chunks: int) -> int:
        """Largest allowed number of stages per device up to ``num_chunks``, or the smallest
        allowed."""
        more = max(0, num_chunks - self.least_chunks)
        return self.least_chunks + (more - more % self.chunk_step if self.chunk_step else 0)

    def place(self, num_devices: int, num_chunks: int) -> Placement:
        """Placement with ``num_chunks`` stages per device; raises ValueError for a number not
        allowed."""
        for what, number in (("devices", num_devices), ("stages on a device", num_chunks)):
            if type(number) is not int or number < 1:
                raise ValueError(
                    f"{self.name}: the number of {what} must be a whole one from 1 on, is "
                    f"{number!r}"
                )
        if not self.allows(num_chunks):
            raise ValueError(
                f"a device of {self.name} hosts {self.chunks} stage(s); got {num_chunks}"
            )
        homes = self.homes(num_devices, num_chunks)
        step = num_devices * self.of_chain or len(homes)
        return Placement(self, num_devices, homes, tuple(range(0, len(homes), step)))


@dataclass(frozen=True)
class Placement:
    """Device of each stage: ``device_of_stage[s]`` is the pipeline device that hosts stage ``s``.

    ``starts`` are the stages where a chain begins: one stage, or one per chain of a cascade. The
    chains of a cascade share the devices and exchange nothing.
    """

    kind: PlacementKind
    num_devices: int
    device_of_stage: tuple[int, ...]
    starts: tuple[int, ...] = (0,)

    @property
    def num_stages(self) -> int:
        """Number of stages in the chain (virtual stages included)."""
        return len(self.device_of_stage)

    @property
    def num_chunks(self) -> int:
        """Stages per device (Megatron's virtual pipeline size)."""
        return len(self.stages_of_device(0))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Last stage of each chain, in the order of ``starts``."""
        return tuple(stage - 1 for stage in (*self.starts[1:], self.num_stages))

    @cached_property
    def before(self) -> Mapping[int, int | None]:
        """Predecessor of each stage, whose output it takes; None at the beginning of a chain."""
        return {s: None if s in self.starts else s - 1 for s in range(self.num_stages)}

    @cached_property
    def after(self) -> Mapping[int, int | None]:
        """Successor of each stage, which takes its output; None at the end of a chain."""
        return {s: None if s in self.ends else s + 1 for s in range(self.num_stages)}

    def chain_of(self, stage: int) -> int:
        """The number of the chain that ``stage`` belongs to."""
        return bisect_right(self.starts, stage) - 1

    def over(self, num_devices: int) -> Placement:
        """Placement of the same kind, with as many stages on each of ``num_devices`` devices."""
        return make_placement(self.kind.name, num_devices, self.num_chunks)

    def stages_of_device(self, device: int) -> tuple[int, ...]:
        """The stages on ``device`` in chain order; the i-th is Megatron's model chunk i."""
        return _stages_of_devices(self)[device]


@dataclass(frozen=True)
class Partition:
    """Cuts of the chain: stage ``s`` holds the layers ``cuts[s] <= i < cuts[s + 1]``."""

    placement: Placement
    cuts: tuple[int, ...]

    def layers_of_stage(self, stage: int) -> range:
        """Indices of the layers in ``stage``."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def per_stage(self, values: Sequence[float]) -> tuple[float, ...]:
        """Sums of ``values``, one per layer, over the layers of each stage."""
        return tuple(map(sum, map(values.__getitem__, self._slices)))

    @cached_property
    def _slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.cuts, self.cuts[1:]))

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


def _in_turn(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    return tuple(range(num_devices)) * num_chunks


def _there_and_back(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    there = tuple(range(num_devices))
    return (*there, *reversed(there)) * (num_chunks // 2)


def _in_both_directions(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    there = tuple(range(num_devices))
    back = there[::-1]
    turns = ((*there, *back), (*back, *there))
    return tuple(home for chain in range(num_chunks // 2) for home in turns[chain % 2])


SEQUENTIAL = PlacementKind(
    "sequential",
    "one stage on each device",
    _in_turn,
    classics=("1f1b", "zb-h1"),
    auto="1f1b",
)
INTERLEAVED = PlacementKind(
    "interleaved",
    "several stages on each device, round-robin",
    _in_turn,
    least_chunks=2,
    chunk_step=1,
    classics=("interleaved",),
    auto="interleaved",
)
FOLD = PlacementKind(
    "fold",
    "stages there and back over the devices",
    _there_and_back,
    least_chunks=2,
    chunk_step=2,
    mirrored=True,
    classics=("zb-v", "dualpipe-v", "hanayo"),
)
OPPOSITE = PlacementKind(
    "opposite",
    "a cascade's chains, each folded, by turns in opposite directions",
    _in_both_directions,
    least_chunks=4,
    chunk_step=2,
    of_chain=2,
)

PLACEMENTS: dict[str, PlacementKind] = {
    kind.name: kind for kind in (SEQUENTIAL, INTERLEAVED, FOLD, OPPOSITE)
}
"""All kinds of placements by name."""


def sequential(num_devices: int) -> Placement:
    """One stage per device, in order."""
    return SEQUENTIAL.place(num_devices, 1)


def interleaved(num_devices: int, num_chunks: int = 2) -> Placement:
    """``num_chunks`` stages per device, looped (Megatron's virtual pipeline)."""
    return INTERLEAVED.place(num_devices, num_chunks)


def fold(num_devices: int, num_waves: int = 1) -> Placement:
    """Stages folded over the devices, so that both ends of a nested skip share a device."""
    return FOLD.place(num_devices, 2 * num_waves)


def opposite(num_devices: int, num_chains: int = 2) -> Placement:
    """Chains of a cascade, each folded over all devices, alternately in opposite directions."""
    return make_placement(OPPOSITE.name, num_devices, 2 * num_chains)


def make_placement(kind: str, num_devices: int, num_chunks: int = 2) -> Placement:
    """Make the placement called ``kind`` with up to ``num_chunks`` stages on each device.

    One device always hosts a whole chain as one stage.
    """
    meant = PLACEMENTS[kind]
    if num_devices == 1:
        chains = meant.most_chunks(num_chunks) // meant.of_chain if meant.of_chain else 1
        return Placement(meant, 1, (0,) * chains, tuple(range(chains)))
    return meant.place(num_devices, meant.most_chunks(num_chunks))
