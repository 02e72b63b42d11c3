"""Which activations to compute again where they do not all fit: as little work as will do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.stages import Cut, Stages
from megatron_pulse.profile.devices import ELEMENT_BYTES

BINS = 4096
"""Into which the bytes to be spared are divided; what a layer spares is rounded down to them."""

LEVELS = 6
"""Steps from nothing computed again to all, in which cuts are looked for."""

FEWER = 0.7
"""Share of what is in flight at full rate that there is to be room for, but for ample room: with
split backwards it costs little."""


@dataclass(frozen=True)
class Spared:
    """What computing a layer's activations again takes and spares: ``seconds`` of a microbatch,
    and ``num_bytes`` of all that are in flight; ``transient`` more bytes are in use meanwhile."""

    layer: int
    seconds: float
    num_bytes: float
    transient: float


def least_work(layers: Sequence[Spared], need: float, beside: float = 0.0) -> frozenset[int] | None:
    """Those of a device's ``layers`` that spare ``need`` bytes in the fewest seconds.

    One that is computed again needs its ``transient`` bytes, as far as they are more than
    ``beside``, which are there in any case. None where all of them do not spare enough. A knapsack
    over bins of bytes, for each of the largest transients that may be chosen up to: exact but for
    what rounding down to bins loses, at most len(layers) of ``BINS`` of the need.
    """
    if need < 1:
        return frozenset()
    best: tuple[float, frozenset[int]] | None = None
    for most in sorted({max(beside, layer.transient) for layer in layers}):
        allowed = [each for each in layers if each.transient <= most and each.num_bytes > 0]
        chosen = _knapsack(allowed, need + most - beside)
        if chosen is None:
            continue
        seconds = sum(each.seconds for each in chosen)
        if best is None or seconds < best[0]:
            best = seconds, frozenset(each.layer for each in chosen)
    return None if best is None else best[1]


def _knapsack(layers: Sequence[Spared], need: float) -> list[Spared] | None:
    """Those with the fewest seconds that together spare ``need``; None where all do not."""
    if sum(layer.num_bytes for layer in layers) < need:
        return None
    by_seconds = sorted(layers, key=lambda each: each.seconds / each.num_bytes)
    chosen = _without_surplus(_first_enough(by_seconds, need), need)
    size = need / BINS
    bins = [min(BINS, int(layer.num_bytes / size)) for layer in layers]
    if sum(bins) < BINS:
        return chosen
    least = np.full(BINS + 1, np.inf)  # seconds that spare so many bins or more
    least[0] = 0.0
    taken = []
    for layer, count in zip(layers, bins, strict=True):
        before = np.concatenate((np.full(count, least[0]), least[: BINS + 1 - count]))
        taken.append(before + layer.seconds < least)
        least = np.minimum(least, before + layer.seconds)
    found, left = [], BINS
    for i in reversed(range(len(layers))):
        if left > 0 and taken[i][left]:
            found.append(layers[i])
            left = max(0, left - bins[i])
    return min(_without_surplus(found, need), chosen, key=_seconds)


def _first_enough(layers: Sequence[Spared], need: float) -> list[Spared]:
    """The first that together spare ``need``."""
    found, spared = [], 0.0
    for layer in layers:
        if spared >= need:
            break
        found.append(layer)
        spared += layer.num_bytes
    return found


def _without_surplus(chosen: Sequence[Spared], need: float) -> list[Spared]:
    """Without those, the dearest first, that are not needed beside the others."""
    left, surplus = list(chosen), sum(layer.num_bytes for layer in chosen) - need
    for layer in sorted(chosen, key=lambda each: -each.seconds):
        if layer.num_bytes <= surplus:
            left.remove(layer)
            surplus -= layer.num_bytes
    return left


def _seconds(layers: Sequence[Spared]) -> float:
    return sum(layer.seconds for layer in layers)


class Sparing(Cut):
    """Stages of which as few layers as are needed compute their activations again."""

    def needed(self, config: Config, partition: Partition) -> frozenset[int]:
        """The layers to compute again with these cuts, so that there is room for what is in flight
        at about full rate; where all of a device do not spare enough, fewer will be."""
        stages = self.cut_with(config, partition, frozenset())
        placement, flying = (
            partition.placement,
            self._flying(config, 1.0 if config.ample else FEWER),
        )
        chosen: frozenset[int] = frozenset()
        for device in range(placement.num_devices):
            own = placement.stages_of_device(device)
            need = sum(flying[s] * stages.saved_bytes[s] for s in own) - self.left(stages, device)
            if need <= 0:
                continue
            layers = [
                each
                for s in own
                for each in self._sparing(config, partition.layers_of_stage(s), flying[s])
            ]
            found = least_work(layers, need, stages.working_bytes[device])
            chosen |= frozenset(each.layer for each in layers) if found is None else found
        return chosen

    def holds(self, config: Config, stages: Stages, share: float) -> bool:
        """Whether there is room for that share of what is in flight at full rate."""
        flying = self._flying(config, share)
        held = stages.per_device(
            tuple(n * b for n, b in zip(flying, stages.saved_bytes, strict=True))
        )
        return all(self.left(stages, device) >= need for device, need in enumerate(held))

    def rule(self, config: Config, share: float, beside: float) -> MemoryRule:
        """What a device may hold beside so many bytes, with that share of full rate's in flight."""
        per_parameter = self.per_parameter(config)
        return MemoryRule(
            self.cluster.usable_bytes - beside,
            per_parameter,
            self._flying(config, share),
            ELEMENT_BYTES[self.profile.dtype] / per_parameter,
        )

    def levels(self, config: Config) -> list[frozenset[int]]:
        """More and more layers, from none to all that spare bytes, first those that spare the most
        for a second's work."""
        layers = sorted(
            self._sparing(config, range(len(self.profile.layers)), 1.0),
            key=lambda each: each.seconds / each.num_bytes,
        )
        total, spared = sum(each.num_bytes for each in layers), 0.0
        levels, taken = [frozenset[int]()], set[int]()
        for each in layers:
            taken.add(each.layer)
            spared += each.num_bytes
            if spared >= total * len(levels) / LEVELS * (1 - 1e-9):
                levels.append(frozenset(taken))
        return levels

    def _flying(self, config: Config, share: float) -> tuple[float, ...]:
        """Of each stage, that share of the microbatches in flight at full rate, at least one."""
        count = config.num_microbatches(self.global_batch_size)
        return tuple(max(1.0, share * n) for n in in_flight(config.placement, count))

    def _sparing(self, config: Config, layers: Iterable[int], times: float) -> Iterator[Spared]:
        """What each of ``layers`` takes and spares ``times`` in flight, where it spares any."""
        kept = self.costs(config, frozenset())
        again = self.costs(config, self.profile.recomputed(True))
        held = self._times_at(config.micro_batch_size)
        for i in layers:
            fewer = kept.saved_bytes[i] - again.saved_bytes[i]
            if fewer > 0 and i not in self.profile.embedders:
                seconds = again.backward_s[i] - kept.backward_s[i]
                transient = held[i].peak_bytes / self.parts(config, i)
                yield Spared(i, seconds, times * fewer, transient)
