"""All ways to shard a chain that divide the batch, under a cap on memory.

Samples of a microbatch, how often parameters are gathered and gradients reduced, units,
prefetching. Layers are recomputed, those first whose activations take most for the time of their
forward, until the step fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.sharded.sharding import (
    AVERAGE_BYTES,
    STATE_BYTES,
    Gathering,
    ShardedUnit,
    Sharding,
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


class Recomputed(NamedTuple):
    """Layers that are computed again, and the bytes of activations that then are held: from forward
    to backward, and at most while a layer is computed again."""

    layers: frozenset[int]
    kept: float
    again: float


def recomputed(costs: ChainCosts, inputs: Sequence[float], room: float) -> Recomputed:
    """As few as fit ``room``, or all that gain; ``inputs`` are what a recomputed layer keeps."""
    gains = [saved - taken for saved, taken in zip(costs.saved_bytes, inputs, strict=True)]
    order = sorted(
        (i for i, gain in enumerate(gains) if gain > 0),
        key=lambda i: gains[i] / max(costs.forward_s[i], 1e-12),
        reverse=True,
    )
    kept, again, chosen = float(sum(costs.saved_bytes)), 0.0, set()
    for i in order:
        if kept + again <= room:
            break
        chosen.add(i)
        kept -= gains[i]
        again = max(again, float(costs.saved_bytes[i]))
    return Recomputed(frozenset(chosen), kept, again)


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
    """A way with as few layers recomputed as fit; ``needs_bytes`` on each device, which may be more
    than there are where nothing fits."""

    way: Way
    again: Recomputed
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
        self.costs = cache(lambda size: profile.at(size, False))
        self.inputs = cache(lambda size: profile.at(size, True).saved_bytes)
        self.recomputed = cache(self._recomputed)
        self.bare = cache(self._bare)
        self._peak = cache(self._peak_of)
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

    def again(self, way: Way) -> Recomputed:
        """Its layers that are recomputed."""
        return self.recomputed(way.micro_batch_size, self._room(way))

    def fit(self, way: Way) -> FittedWay:
        """The way with its costs."""
        again = self.again(way)
        size, costs = way.micro_batch_size, self.costs(way.micro_batch_size)
        inputs, units = self.inputs(way.micro_batch_size), []
        for bare, own in zip(self.bare(way.about), self._grouped(way.about), strict=True):
            twice = again.layers.intersection(own)
            forward_s = sum(costs.forward_s[i] for i in own)
            backward_s = sum(costs.backward_s[i] + costs.forward_s[i] * (i in twice) for i in own)
            units.append(
                ShardedUnit(
                    self.time_scale * forward_s,
                    self.time_scale * backward_s,
                    bare.moved_bytes,
                    bare.parameter_bytes,
                    bare.state_bytes,
                    float(sum((inputs if i in twice else costs.saved_bytes)[i] for i in own)),
                    float(max((costs.saved_bytes[i] for i in twice), default=0)),
                    bare.trained,
                )
            )
        sharding = self._sharding(way, tuple(units), self.count(size))
        return FittedWay(way, again, sharding, state_bytes(sharding) + peak_bytes(sharding))

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
        """Seconds that a device computes in a step."""
        costs = self.costs(way.micro_batch_size)
        each = sum(costs.forward_s) + sum(costs.backward_s)
        each += sum(costs.forward_s[i] for i in self.again(way).layers)
        return self.time_scale * each * self.count(way.micro_batch_size)

    def hopeless(self, way: Way) -> bool:
        """Whether it cannot fit, for what is certainly held."""
        held = sum(unit.state_bytes for unit in self.bare(way.about)) / way.group
        return self._room(way) < 0 or held + self.again(way).kept > self.usable

    def _sharding(self, way: Way, units: tuple[ShardedUnit, ...], count: int) -> Sharding:
        of = way.group, way.gathering, way.reduce_once, way.prefetch
        return Sharding(units, self.num_devices, count, *of)

    def _room(self, way: Way) -> float:
        """Bytes that are left for activations."""
        held = sum(unit.state_bytes for unit in self.bare(way.about)) / way.group
        # Of a group and a microbatch nothing else bears on what parameters and gradients take.
        alike = way._replace(group=1, micro_batch_size=0)
        return self.usable - held - self._peak(alike, min(2, self.count(way.micro_batch_size)))

    def _peak_of(self, way: Way, count: int) -> float:
        return peak_bytes(self._sharding(way, self.bare(way.about), count))

    def _recomputed(self, size: int, room: float) -> Recomputed:
        return recomputed(self.costs(size), self.inputs(size), room)
