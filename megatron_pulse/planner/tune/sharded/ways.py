"""All ways to shard a chain that divide the batch, under a cap on memory.

Samples of a microbatch, how often parameters are gathered and gradients reduced, units,
prefetching. Of as few layers as will do all is computed again, or what is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from megatron_pulse.planner.tune.sharded.again import ComputedAgain, Recomputing
from megatron_pulse.planner.tune.sharded.in_turn import Room
from megatron_pulse.planner.tune.sharded.sharding import (
    AVERAGE_BYTES,
    STATE_BYTES,
    STEADY,
    SUMMED_BYTES,
    Gathering,
    ShardedUnit,
    Sharding,
    grouped,
    held_bytes,
    peak_bytes,
    state_bytes,
)
from megatron_pulse.profile.devices import ELEMENT_BYTES
from megatron_pulse.profile.profile import Profile

UNITS = (12, 32, 96)
"""About as many; small units take little memory, large ones few collectives."""

PREFETCH = (1, 3, 6)
"""Units that are gathered ahead."""


class Way(NamedTuple):
    """A way without its costs: ``about`` so many units, as ``Sharding`` has the rest."""

    group: int
    micro_batch_size: int
    about: int
    gathering: Gathering
    reduce_once: bool
    prefetch: int


@dataclass(frozen=True)
class FittedWay:
    """A way with as little computed again as fits; ``layers`` of each of its units,
    ``needs_bytes`` on each device, which may be more than there are where nothing fits."""

    way: Way
    again: ComputedAgain
    layers: tuple[range, ...]
    sharding: Sharding
    needs_bytes: float


class Ways:
    """The ways to train the layers of ``profile`` on ``num_devices`` with ``usable`` bytes each, on
    ``samples`` a step in microbatches of ``sizes``.

    ``moved`` says as how many bytes so many parameters travel (default: as they are), and every
    second is ``time_scale`` seconds, where ways are emulated. With ``averages`` trained parameters
    have one each.
    """

    def __init__(
        self,
        profile: Profile,
        num_devices: int,
        samples: int,
        usable: float,
        sizes: Sequence[int],
        moved: Callable[[int], int] | None = None,
        time_scale: float = 1.0,
        averages: bool = False,
    ) -> None:
        self.profile, self.num_devices, self.samples = profile, num_devices, samples
        self.usable, self.sizes, self.time_scale = usable, sizes, time_scale
        self.element_bytes = ELEMENT_BYTES[profile.dtype]
        self.trained_bytes = STATE_BYTES + (AVERAGE_BYTES if averages else 0)
        self.moved = moved or (lambda count: self.element_bytes * count)
        self.recomputing = cache(partial(Recomputing, profile))
        self.bare = cache(self._bare)
        self._room = cache(self._room_of)
        self._grouped = cache(lambda about: grouped([x.parameters for x in profile.layers], about))

    def ways(self, group: int) -> Iterator[Way]:
        """Those of groups of so many devices, each way of running only once."""
        for size, about, gathering, once, prefetch in product(
            self.sizes, UNITS, Gathering, (False, True), PREFETCH
        ):
            if self.count(size) == 1 and (once or gathering is Gathering.STEP):
                continue  # the same as others
            yield Way(group, size, about, gathering, once, prefetch)

    def count(self, size: int) -> int:
        """Microbatches of a device."""
        return self.samples // (self.num_devices * size)

    def fit(self, way: Way) -> FittedWay:
        """The way with its costs."""
        return self.costed(way, self.recomputing(way.micro_batch_size).chosen(self._rooms(way)))

    def costed(self, way: Way, again: ComputedAgain) -> FittedWay:
        """The way where these layers are computed again."""
        recomputing, layers = self.recomputing(way.micro_batch_size), self._grouped(way.about)
        chain = recomputing.chain(again)
        units = tuple(
            replace(
                bare,
                forward_s=self.time_scale * sum(chain.forward_s[i] for i in own),
                backward_s=self.time_scale * sum(chain.backward_s[i] for i in own),
                saved_bytes=float(sum(chain.saved_bytes[i] for i in own)),
                again_bytes=recomputing.made_bytes(own, again),
            )
            for bare, own in zip(self.bare(way.about), layers, strict=True)
        )
        sharding = self._sharding(way, units, self.count(way.micro_batch_size))
        needs_bytes = state_bytes(sharding) + peak_bytes(sharding)
        return FittedWay(way, again, tuple(layers), sharding, needs_bytes)

    def _bare(self, about: int) -> tuple[ShardedUnit, ...]:
        """Units with parameters only."""
        found = []
        for own in self._grouped(about):
            layers = [self.profile.layers[i] for i in own]
            count = sum(layer.parameters for layer in layers)
            trained = sum(layer.trained_parameters for layer in layers)
            size = float(self.element_bytes)
            state = float(self.trained_bytes * trained + self.element_bytes * (count - trained))
            share = trained / count if count else 1.0
            found.append(
                ShardedUnit(
                    *(0.0, 0.0, self.moved(count), size * count, state),
                    trained=share,
                    summed_bytes=float(SUMMED_BYTES * trained),
                )
            )
        return tuple(found)

    def bare_sharding(self, way: Way) -> Sharding:
        """The way as if its layers took no time and kept nothing."""
        return self._sharding(way, self.bare(way.about), self.count(way.micro_batch_size))

    def computed_s(self, way: Way) -> float:
        """Seconds below which a device does not compute a step; infinite where nothing fits."""
        recomputing = self.recomputing(way.micro_batch_size)
        costs, again_s = recomputing.costs, recomputing.least_s(self._rooms(way)[-1].held)
        each = sum(costs.forward_s) + sum(costs.backward_s) + again_s
        return self.time_scale * each * self.count(way.micro_batch_size)

    def hopeless(self, way: Way) -> bool:
        """Whether it cannot fit."""
        return not self.recomputing(way.micro_batch_size).may_fit(self._rooms(way))

    def _sharding(self, way: Way, units: tuple[ShardedUnit, ...], count: int) -> Sharding:
        of = way.group, way.gathering, way.reduce_once, way.prefetch
        return Sharding(units, self.num_devices, count, *of)

    def _rooms(self, way: Way) -> tuple[Room, ...]:
        """Bytes that each layer has for activations, beside parameters and gradients."""
        # A microbatch bears on them by how many there are alone.
        alike = way._replace(micro_batch_size=0)
        return self._room(alike, min(STEADY, self.count(way.micro_batch_size)))

    def _room_of(self, way: Way, count: int) -> tuple[Room, ...]:
        bare, layers = self._sharding(way, self.bare(way.about), count), self._grouped(way.about)
        left = self.usable - state_bytes(bare) - 1  # byte, for rounding
        return tuple(
            Room(left - max(forward, backward), left - backward)
            for own, (forward, backward) in zip(layers, held_bytes(bare), strict=True)
            for _ in own
        )
