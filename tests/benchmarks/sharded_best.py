"""FSDP2, HSDP and DDP at their best under a memory cap: microbatches, recomputation, sharding.

Every way is tried that divides the batch: samples of a microbatch, how often parameters are
gathered and gradients reduced, units, prefetching. Layers are recomputed, those first whose
activations take most for the time of their forward, until the step fits; what is predicted to be
the fastest runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.partition.memory import bytes_per_parameter
from tests.benchmarks.contestant import Contestant, Engine, Refused
from tests.benchmarks.emulation import Emulation, element_count
from tests.benchmarks.sharding import (
    Gathering,
    Sharding,
    Unit,
    grouped,
    peak_bytes,
    state_bytes,
    step_bytes,
    step_s,
)

NEAR = 1.1
"""Of FSDP2 the best of each way to gather runs, if it is predicted to take so much at most."""

UNITS = (12, 32, 96)
"""About as many; small units take little memory, large ones few collectives."""

PREFETCH = (1, 3, 6)
"""Units that are gathered ahead."""

HSDP_GROUP = 2


@dataclass(frozen=True)
class Recomputed:
    """Layers that are computed again, and the real bytes of activations that then are held: from
    forward to backward, and at most while a layer is computed again."""

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


class DataParallel:
    """Data-parallel contestants of one backbone, on V100s that may take ``usable`` bytes."""

    def __init__(
        self, emulation: Emulation, link: Link, num_devices: int, samples: int, usable: float
    ) -> None:
        self.emulation, self.link, self.num_devices = emulation, link, num_devices
        self.samples, self.usable = samples, usable
        self.parameters = emulation.costs.parameters
        self.costs = cache(lambda size: emulation.profile.at(size, False))
        self.inputs = cache(lambda size: emulation.profile.at(size, True).saved_bytes)

    def offers(self) -> tuple[list[Contestant], list[Refused]]:
        """What runs, and what fits in no way."""
        entered: list[Contestant] = []
        refused: list[Refused] = []
        ways = [(Engine.DATA_PARALLEL, self._replicated())]
        ways += [(Engine.FSDP2, self._sharded(self.num_devices, Engine.FSDP2))]
        if self.num_devices >= 4 and self.num_devices % HSDP_GROUP == 0:
            ways += [(Engine.HSDP, self._sharded(HSDP_GROUP, Engine.HSDP))]
        for engine, found in ways:
            fitting: dict[object, Contestant] = {}
            least: Refused | None = None
            for one in found:
                if isinstance(one, Refused):
                    least = min(least or one, one, key=lambda r: r.needs_bytes)
                    continue
                key = one.sharding.gathering if one.sharding else None
                if key not in fitting or one.predicted_s < fitting[key].predicted_s:
                    fitting[key] = one
            best = min((c.predicted_s for c in fitting.values()), default=0.0)
            near = [c for c in fitting.values() if c.predicted_s <= NEAR * best]
            if engine is not Engine.FSDP2:
                near = [c for c in near if c.predicted_s == best][:1]
            entered += near
            if not near and least is not None:
                refused.append(least)
        return entered, refused

    def sizes(self) -> Iterator[int]:
        """Samples of a microbatch, powers of two that divide a device's share of the batch."""
        each, left = divmod(self.samples, self.num_devices)
        usual = self.emulation.micro_batch_size
        for size in (2**k for k in range(each.bit_length() if not left else 0)):
            if usual <= 4 * size and size <= 4 * usual and each % size == 0:
                yield size

    def _replicated(self) -> Iterator[Contestant | Refused]:
        """Megatron's DDP with the distributed optimizer."""
        num = self.num_devices
        state = sum(self.parameters) * bytes_per_parameter("float16", True, num)
        for size in self.sizes():
            costs, again = self.costs(size), self._recomputed(size, self.usable - state)
            needs, way = state + again.kept + again.again, self._way(size, again)
            if needs > self.usable:
                yield Refused(str(Engine.DATA_PARALLEL), Engine.DATA_PARALLEL, way, needs)
                continue
            layers = tuple(
                (*self._seconds(costs, [i], again), self._elements(n))
                for i, n in enumerate(self.parameters)
            )
            yield replace(
                replicated(layers, self.link, num, self.samples // size),
                state_bytes=(state,) * num,
                saved_bytes=(again.kept, again.again),
                way=way,
                micro_batch_size=size,
            )

    def _sharded(self, group: int, engine: Engine) -> Iterator[Contestant | Refused]:
        for size, about, gathering, once, prefetch in product(
            self.sizes(), UNITS, Gathering, (False, True), PREFETCH
        ):
            count = self.samples // (self.num_devices * size)
            if count == 1 and (once or gathering is Gathering.STEP):
                continue  # the same as others
            layers = grouped(self.parameters, about)
            bare = self._way_of(size, layers, None, count, group, gathering, once, prefetch)
            room = self.usable - state_bytes(bare) - peak_bytes(bare)
            again = self._recomputed(size, room)
            way = self._way_of(size, layers, again, count, group, gathering, once, prefetch)
            needs = state_bytes(way) + peak_bytes(way)
            said = f"{self._way(size, again)}, {way}"
            if needs > self.usable:
                yield Refused(str(engine), engine, said, needs)
                continue
            yield Contestant(
                f"{engine}, gathered {gathering}" if engine is Engine.FSDP2 else str(engine),
                engine,
                count * self.num_devices,
                layers=tuple((u.forward_s, u.backward_s, u.elements) for u in way.units),
                predicted_s=step_s(way, self.link),
                expected_bytes=self.num_devices * step_bytes(way),
                state_bytes=(state_bytes(way),) * self.num_devices,
                way=said,
                micro_batch_size=size,
                sharding=way,
            )

    def _way_of(
        self,
        size: int,
        layers: Sequence[range],
        again: Recomputed | None,
        count: int,
        group: int,
        gathering: Gathering,
        once: bool,
        prefetch: int,
    ) -> Sharding:
        """Without activations where nothing is said of what is recomputed."""
        units = []
        for own in layers:
            costs, num = self.costs(size), sum(self.parameters[i] for i in own)
            elements = self.num_devices * math.ceil(self._elements(num) / self.num_devices)
            forward_s, backward_s = self._seconds(costs, own, again)
            kept = repeated = 0.0
            if again is not None:
                twice = again.layers.intersection(own)
                inputs = self.inputs(size)
                kept = float(sum((inputs if i in twice else costs.saved_bytes)[i] for i in own))
                repeated = float(max((costs.saved_bytes[i] for i in twice), default=0))
            units.append(Unit(forward_s, backward_s, elements, 2.0 * num, kept, repeated))
        return Sharding(tuple(units), self.num_devices, count, group, gathering, once, prefetch)

    def _recomputed(self, size: int, room: float) -> Recomputed:
        return recomputed(self.costs(size), self.inputs(size), room)

    def _seconds(
        self, costs: ChainCosts, layers: Sequence[int], again: Recomputed | None
    ) -> tuple[float, float]:
        """Emulated, of both passes; a backward computes again what is to be."""
        twice = again.layers if again is not None else frozenset()
        forward = sum(costs.forward_s[i] for i in layers)
        backward = sum(costs.backward_s[i] + costs.forward_s[i] * (i in twice) for i in layers)
        return self.emulation.time_scale * forward, self.emulation.time_scale * backward

    def _elements(self, parameters: int) -> int:
        return element_count(2 * parameters, self.emulation.byte_divisor)

    def _way(self, size: int, again: Recomputed) -> str:
        told = f"{len(again.layers)} of {len(self.parameters)} layers recomputed"
        return f"b={size}" + (f", {told}" if again.layers else "")


def replicated(
    layers: tuple[tuple[float, float, int], ...], link: Link, num_devices: int, count: int
) -> Contestant:
    """Megatron's DDP over ``layers`` (forward and backward seconds, elements of gradients), with
    ``count`` microbatches of all devices; its memory is the caller's to say.

    Gathering hides behind the first forward, reduction behind the last backward.
    """
    size = 4 * sum(n for _, _, n in layers)
    share = size * (num_devices - 1) / num_devices
    forward, backward = sum(f for f, _, _ in layers), sum(b for _, b, _ in layers)
    exposed = max(0.0, link.time_s(share) - forward)
    exposed += max(0.0, link.time_s(share) - backward)
    return Contestant(
        str(Engine.DATA_PARALLEL),
        Engine.DATA_PARALLEL,
        count,
        layers=layers,
        predicted_s=(forward + backward) * count / num_devices + exposed,
        expected_bytes=round(2 * share * num_devices),
    )
