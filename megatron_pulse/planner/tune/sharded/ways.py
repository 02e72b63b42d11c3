"""All ways to shard a chain that divide the batch, under a cap on memory.

Samples of a microbatch, how often parameters are gathered and gradients reduced, units,
prefetching. Of as few layers as will do all is computed again, or what is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from typing import NamedTuple

from megatron_pulse.planner.tune.sharded.again import ComputedAgain, Recomputing
from megatron_pulse.planner.tune.sharded.sharding import (
    AVERAGE_BYTES,
    STATE_BYTES,
    STEADY,
    Gathering,
    ShardedUnit,
    Sharding,
    full_bytes,
    grouped,
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
        self._peaks = cache(self._peaks_of)
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
        """The way with its costs.

        What is held beside activations when these are the most is less than the most of it: room
        for them is looked for between what is there in any case and what can be.
        """

        def fits(again: ComputedAgain) -> bool:
            return self.costed(way, again).needs_bytes <= self.usable

        recomputing = self.recomputing(way.micro_batch_size)
        return self.costed(way, recomputing.fitting(*self._rooms(way), self.usable, fits))

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
                again_bytes=max(recomputing.made_bytes(i, again) for i in own),
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
                ShardedUnit(0.0, 0.0, self.moved(count), size * count, state, trained=share)
            )
        return tuple(found)

    def bare_sharding(self, way: Way) -> Sharding:
        """The way as if its layers took no time and kept nothing."""
        return self._sharding(way, self.bare(way.about), self.count(way.micro_batch_size))

    def computed_s(self, way: Way) -> float:
        """Seconds below which a device does not compute a step; infinite where nothing fits."""
        recomputing, (_, most) = self.recomputing(way.micro_batch_size), self._rooms(way)
        costs = recomputing.costs
        each = sum(costs.forward_s) + sum(costs.backward_s) + recomputing.least_s(most)
        return self.time_scale * each * self.count(way.micro_batch_size)

    def hopeless(self, way: Way) -> bool:
        """Whether it cannot fit, for what is certainly held."""
        sure, _ = self._rooms(way)
        return sure < 0 or self.computed_s(way) == inf

    def _sharding(self, way: Way, units: tuple[ShardedUnit, ...], count: int) -> Sharding:
        of = way.group, way.gathering, way.reduce_once, way.prefetch
        return Sharding(units, self.num_devices, count, *of)

    def _rooms(self, way: Way) -> tuple[float, float]:
        """Bytes of activations for which there is room in any case, beside the most that is held of
        parameters and gradients; and beside what of these is held while activations are the most.
        """
        held = sum(unit.state_bytes for unit in self.bare(way.about)) / way.group
        # Of a group and a microbatch nothing else bears on what parameters and gradients take.
        alike = way._replace(group=1, micro_batch_size=0)
        peaks = self._peaks(alike, min(STEADY, self.count(way.micro_batch_size)))
        sure, most = (self.usable - held - peak for peak in peaks)
        return sure, most

    def _peaks_of(self, way: Way, count: int) -> tuple[float, float]:
        bare = self._sharding(way, self.bare(way.about), count)
        return peak_bytes(bare), full_bytes(bare)
