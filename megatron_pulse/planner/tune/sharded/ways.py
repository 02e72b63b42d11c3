"""All ways to shard a chain that divide the batch, under a cap on memory.

Samples of a microbatch, how often parameters are gathered and gradients reduced, units,
prefetching. Layers are recomputed, all or what is cheap of them, first what spares most for its
time, until the step fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.sharded.sharding import (
    AVERAGE_BYTES,
    MOST,
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
    """Layers that are computed again, and those of which what is cheap is; the bytes of activations
    that then are held: from forward to backward, and at most while a layer is computed again."""

    layers: frozenset[int]
    part: frozenset[int]
    kept: float
    again: float


class Recomputable(NamedTuple):
    """A chain that keeps all, what layers take alone, and all that is not cheap."""

    every: ChainCosts
    inputs: ChainCosts
    dear: ChainCosts

    def of(self, layer: int, again: Recomputed) -> ChainCosts:
        """The one that the layer is in."""
        if layer in again.layers:
            return self.inputs
        return self.dear if layer in again.part else self.every

    def more_s(self, layer: int, again: Recomputed) -> float:
        """Seconds that its backward takes longer."""
        costs = self.of(layer, again)
        return costs.backward_s[layer] - self.every.backward_s[layer]

    def made_bytes(self, layer: int, costs: ChainCosts) -> float:
        """What is there of its activations while they are computed again, if it is in ``costs``."""
        kept = 0 if costs is self.inputs else costs.saved_bytes[layer]
        return float(self.every.saved_bytes[layer] - kept)


def recomputed(chain: Recomputable, room: float) -> Recomputed:
    """As little as fits ``room``, or all that gains; first what spares most for its seconds."""
    every = chain.every
    choices = [
        (
            every.saved_bytes[i] - costs.saved_bytes[i],
            costs.backward_s[i] - every.backward_s[i],
            i,
            costs,
        )
        for costs in (chain.inputs, chain.dear)
        for i in range(len(every))
    ]
    order = sorted(
        (choice for choice in choices if choice[0] > 0),
        key=lambda choice: choice[0] / max(choice[1], 1e-12),
        reverse=True,
    )
    kept = float(sum(every.saved_bytes))
    chosen = dict[int, ChainCosts]()

    def held(layer: int, costs: ChainCosts | None) -> float:
        return (every if costs is None else costs).saved_bytes[layer]

    def made(chosen: Mapping[int, ChainCosts]) -> float:
        return max((chain.made_bytes(i, costs) for i, costs in chosen.items()), default=0.0)

    for _, _, i, costs in order:
        if kept + made(chosen) <= room:
            break
        if held(i, costs) < held(i, chosen.get(i)):
            kept += held(i, costs) - held(i, chosen.get(i))
            chosen[i] = costs
    for i in sorted(chosen, key=lambda i: every.backward_s[i] - chosen[i].backward_s[i]):
        for less in (None, chain.dear):  # what is not needed beside the others, the dearest first
            if less is chosen[i] or held(i, less) < held(i, chosen[i]):
                continue
            others = {j: costs for j, costs in chosen.items() if j != i}
            others |= {} if less is None else {i: less}
            more = held(i, less) - held(i, chosen[i])
            if kept + more + made(others) <= room:
                kept, chosen = kept + more, others
                break
    whole = frozenset(i for i, costs in chosen.items() if costs is chain.inputs)
    return Recomputed(whole, frozenset(chosen) - whole, kept, made(chosen))


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
        every = range(len(profile.layers))
        self.kept = cache(
            lambda size: Recomputable(
                self.costs(size), profile.at(size, True), profile.at(size, False, every)
            )
        )
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
        costs, kept = self.costs(way.micro_batch_size), self.kept(way.micro_batch_size)
        units = []
        for bare, own in zip(self.bare(way.about), self._grouped(way.about), strict=True):
            forward_s = sum(costs.forward_s[i] for i in own)
            backward_s = sum(kept.of(i, again).backward_s[i] for i in own)
            units.append(
                ShardedUnit(
                    self.time_scale * forward_s,
                    self.time_scale * backward_s,
                    bare.moved_bytes,
                    bare.parameter_bytes,
                    bare.state_bytes,
                    float(sum(kept.of(i, again).saved_bytes[i] for i in own)),
                    max(kept.made_bytes(i, kept.of(i, again)) for i in own),
                    bare.trained,
                )
            )
        sharding = self._sharding(way, tuple(units), self.count(way.micro_batch_size))
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
        again, kept = self.again(way), self.kept(way.micro_batch_size)
        each += sum(kept.more_s(i, again) for i in again.layers | again.part)
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
        return self.usable - held - self._peak(alike, min(MOST, self.count(way.micro_batch_size)))

    def _peak_of(self, way: Way, count: int) -> float:
        return peak_bytes(self._sharding(way, self.bare(way.about), count))

    def _recomputed(self, size: int, room: float) -> Recomputed:
        return recomputed(self.kept(size), room)
