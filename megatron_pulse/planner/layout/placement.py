"""Which device hosts which stage, and which layers a stage holds.

=============  ==========================  ====================================
placement      P = 3                       stage s is on device
=============  ==========================  ====================================
sequential     0 1 2                       s
interleaved    0 1 2 0 1 2                 s mod P
fold (W = 1)   0 1 2 2 1 0                 s, then mirrored (PULSE, section IV)
fold (W = 2)   0 1 2 2 1 0 0 1 2 2 1 0     the same, once per wave
=============  ==========================  ====================================

What each kind of placement means is a row of ``PLACEMENTS``, which everything else reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class PlacementKind:
    """How stages are laid over devices; kinds are told apart by their names.

    ``homes(P, V)`` are the devices of the stages where each of P devices hosts V: ``least_chunks``
    or more by steps of ``chunk_step`` (0: never more). ``mirrored`` kinds have stage s and its
    mirror S-1-s on one device, so that nested skips can stay at home; cuts are then searched in
    pairs of stages (``partition/fold``), otherwise stage by stage (``partition/row``). ``classics``
    are the classic schedules that fit, beside gpipe, which fits all; ``auto`` is what a schedule
    called so is. ``help`` is for those who choose.
    """

    name: str
    help: str = field(compare=False, repr=False)
    homes: Callable[[int, int], tuple[int, ...]] = field(compare=False, repr=False)
    least_chunks: int = field(default=1, compare=False, repr=False)
    chunk_step: int = field(default=0, compare=False, repr=False)
    mirrored: bool = field(default=False, compare=False, repr=False)
    classics: tuple[str, ...] = field(default=(), compare=False, repr=False)
    auto: str = field(default="wave", compare=False, repr=False)

    def __str__(self) -> str:
        return self.name

    def allows(self, num_chunks: int) -> bool:
        """Whether each device may host so many stages."""
        more = num_chunks - self.least_chunks
        return more == 0 or (more > 0 and self.chunk_step > 0 and more % self.chunk_step == 0)

    @property
    def chunks(self) -> str:
        """The numbers of stages that a device may host: "1", or for example "2, 4, ..."."""
        least, step = self.least_chunks, self.chunk_step
        return f"{least}, {least + step}, ..." if step else str(least)

    def most_chunks(self, num_chunks: int) -> int:
        """The most stages on a device up to ``num_chunks``, or the least there are."""
        more = max(0, num_chunks - self.least_chunks)
        return self.least_chunks + (more - more % self.chunk_step if self.chunk_step else 0)

    def place(self, num_devices: int, num_chunks: int) -> Placement:
        """``num_chunks`` stages on each device; raises ValueError for a number not allowed."""
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
        return Placement(self, num_devices, self.homes(num_devices, num_chunks))


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
        return make_placement(self.kind.name, num_devices, self.num_chunks)

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

    def per_stage(self, values: Sequence[float]) -> tuple[float, ...]:
        """Values of layers, summed over each stage's."""
        return tuple(sum(values[a:b]) for a, b in zip(self.cuts, self.cuts[1:], strict=False))

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


SEQUENTIAL = PlacementKind(
    "sequential",
    "one stage on each device",
    _in_turn,
    classics=("1f1b", "zb-h1"),
    auto="1f1b",
)
INTERLEAVED = PlacementKind(
    "interleaved",
    "several stages on each device, in turn",
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

PLACEMENTS: dict[str, PlacementKind] = {kind.name: kind for kind in (SEQUENTIAL, INTERLEAVED, FOLD)}
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


def make_placement(kind: str, num_devices: int, num_chunks: int = 2) -> Placement:
    """The placement of that name with up to ``num_chunks`` stages on each device.

    One device always hosts the whole chain as one stage.
    """
    meant = PLACEMENTS[kind]
    if num_devices == 1:
        return Placement(meant, 1, (0,))
    return meant.place(num_devices, meant.most_chunks(num_chunks))
