"""FSDP2, HSDP and DDP at their best under a memory cap: microbatches, recomputation, sharding.

Every way is tried that divides the batch, as the tuner has them (``planner/tune/sharded``), and
what is predicted to be the fastest runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.tune.fsdp.configs import FsdpConfigs
from megatron_pulse.planner.tune.fsdp.layer_dp import ActivationRoom
from megatron_pulse.planner.tune.fsdp.step import (
    ShardedUnit,
    over,
    state_bytes,
    step_bytes,
    step_s,
)
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from tests.benchmarks.contestant import Contestant, Engine, Refused
from tests.benchmarks.emulation import Emulation, element_count, setup_of

NEAR = 1.1
"""Of FSDP2 the best of each way to gather runs, if it is predicted to take so much at most."""

HOST_GBS = (25.0, 6.5)
"""GB/s from the host's memory to each device: 16 lanes of PCIe 4.0, or a quarter of 26 GB/s, what
four devices of a PC share (preset rtx-4090)."""

FP32_BYTES = 4


class DataParallel:
    """Data-parallel contestants of one backbone, on V100s that may take ``usable`` bytes."""

    def __init__(
        self, emulation: Emulation, link: Link, num_devices: int, samples: int, usable: float
    ) -> None:
        self.emulation, self.link, self.num_devices = emulation, link, num_devices
        self.samples, self.usable = samples, usable
        self.num_layers = len(emulation.costs)
        sizes, scale = list(self.sizes()), emulation.time_scale
        of = emulation.profile, num_devices, samples, usable, sizes
        self.ways = FsdpConfigs(*of, self._moved_bytes, scale)

    def offers(self) -> tuple[list[Contestant], list[Refused]]:
        """What runs, and what fits in no way."""
        entered: list[Contestant] = []
        refused: list[Refused] = []
        ways = [(Engine.DATA_PARALLEL, self._replicated())]
        if setup_of(self.emulation.name).adapter_of:
            ways += [(Engine.STREAMED, self._streamed(rate)) for rate in HOST_GBS]
        ways += [(Engine.FSDP2, self._sharded(self.num_devices, Engine.FSDP2))]
        groups = [g for g in range(2, self.num_devices) if self.num_devices % g == 0]
        if groups:
            every = itertools.chain.from_iterable(self._sharded(g, Engine.HSDP) for g in groups)
            ways += [(Engine.HSDP, every)]
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
            if usual <= 4 * size and each % size == 0:
                yield size

    def _replicated(self) -> Iterator[Contestant | Refused]:
        """Megatron's DDP with the distributed optimizer."""
        return self._data_parallel(
            Engine.DATA_PARALLEL, self.emulation.layer_state(self.num_devices)
        )

    def _streamed(self, rate: float) -> Iterator[Contestant | Refused]:
        """The same with frozen weights in the host's memory, from where they come before each use.

        A layer takes the longer of its own time and its weights' at ``rate`` GB/s. The device holds
        two layers' weights.
        """
        costs = self.emulation.costs
        size = ELEMENT_BYTES[self.emulation.profile.dtype]
        frozen = [
            size * (count - trained)
            for count, trained in zip(
                costs.stored_parameters, costs.trained_parameters, strict=True
            )
        ]
        held = self.emulation.layer_state(self.num_devices)
        state = [own - base for own, base in zip(held, frozen, strict=True)]
        state[0] += max(map(sum, pairwise(frozen)))
        copies_s = [each / (rate * 1e9) for each in frozen]
        for one in self._data_parallel(Engine.STREAMED, state, copies_s):
            if isinstance(one, Refused):
                yield one
            else:
                yield replace(one, name=f"{one.name}, {rate:g} GB/s")

    def _data_parallel(
        self, engine: Engine, held: Sequence[float], least_s: Sequence[float] = ()
    ) -> Iterator[Contestant | Refused]:
        """Replicas that hold ``held`` bytes of state, and whose layers take ``least_s`` or more."""
        num, state = self.num_devices, sum(held)
        for size in self.sizes():
            recomputing = self.ways.recomputing(size)
            room = self.usable - state
            again = recomputing.chosen((ActivationRoom(room, room),) * self.num_layers)
            chain, way = recomputing.chain(again), self._way(size, again)
            saved, most = float(sum(chain.saved_bytes)), recomputing.needed_bytes(again)
            needs = state + most
            if needs > self.usable:
                yield Refused(str(engine), engine, way, needs)
                continue
            scale, least = self.emulation.time_scale, least_s or (0.0,) * self.num_layers
            layers = tuple(
                (
                    scale * max(chain.forward_s[i], least[i]),
                    scale * max(chain.backward_s[i], least[i]),
                    self._elements(n),
                )
                for i, n in enumerate(chain.trained_parameters)
            )
            made = replicated(layers, self.link, num, self.samples // size)
            yield replace(
                made,
                name=str(engine),
                engine=engine,
                state_bytes=(state,) * num,
                saved_bytes=(saved, most - saved),
                way=way,
                micro_batch_size=size,
            )

    def _sharded(self, group: int, engine: Engine) -> Iterator[Contestant | Refused]:
        for choice in self.ways.configs(group):
            fitted = self.ways.fit(choice)
            way, needs = fitted.sharding, fitted.needs_bytes
            said = f"{self._way(choice.micro_batch_size, fitted.activations)}, {way}"
            said += f", groups of {group}" * (engine is Engine.HSDP)
            if needs > self.usable:
                yield Refused(str(engine), engine, said, needs)
                continue
            yield Contestant(
                f"{engine}, gathered {way.gathering}" if engine is Engine.FSDP2 else str(engine),
                engine,
                way.count * self.num_devices,
                layers=tuple((u.forward_s, u.backward_s, elements(u)) for u in way.units),
                predicted_s=step_s(way, over(self.link, way)),
                expected_bytes=self.num_devices * step_bytes(way),
                state_bytes=(state_bytes(way),) * self.num_devices,
                way=said,
                micro_batch_size=choice.micro_batch_size,
                sharding=way,
            )

    def _moved_bytes(self, parameters: int) -> int:
        """Emulated, of a unit that all devices can divide."""
        count = self.num_devices * math.ceil(self._elements(parameters) / self.num_devices)
        return FP32_BYTES * count

    def _elements(self, parameters: int) -> int:
        return element_count(2 * parameters, self.emulation.byte_divisor)

    def _way(self, size: int, again: ActivationPolicies) -> str:
        told = f"{len(again.recompute)} of {self.num_layers} layers recomputed"
        part = f"what is cheap of {len(again.selective)}"
        return (
            f"b={size}" + f", {told}" * bool(again.recompute) + f", {part}" * bool(again.selective)
        )


def elements(unit: ShardedUnit) -> int:
    """Emulated fp32 elements of its parameters, which are what travels."""
    return unit.moved_bytes // FP32_BYTES


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
