"""Which layers are computed again where not all activations fit, on a device with all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.memory.knapsack import Spared, least_seconds
from megatron_pulse.planner.tune.memory.least_work import least_work
from megatron_pulse.profile.profile import Profile

NEAR = 1 / 256
"""Share of a device's memory to which the room for activations is found."""


class ComputedAgain(NamedTuple):
    """Layers that are computed again, and those of which what is cheap is."""

    layers: frozenset[int]
    part: frozenset[int]


class Recomputing:
    """The layers of ``profile`` on microbatches of ``size`` samples, where they are not computed
    again (``costs``), and what each spares and takes if it is."""

    def __init__(self, profile: Profile, size: int) -> None:
        self._profile, self._size = profile, size
        every = range(len(profile.layers))
        self.costs = costs = profile.at(size, False)
        whole, part = profile.at(size, True), profile.at(size, False, every)
        self._saved_bytes = float(sum(costs.saved_bytes))
        self._spared = [
            Spared(
                i,
                whole.backward_s[i] - costs.backward_s[i],
                costs.saved_bytes[i] - whole.saved_bytes[i],
                float(costs.saved_bytes[i]),
                part_s=part.backward_s[i] - costs.backward_s[i],
                part_bytes=costs.saved_bytes[i] - part.saved_bytes[i],
                part_transient=float(costs.saved_bytes[i] - part.saved_bytes[i]),
            )
            for i in every
        ]
        self._shared_bytes = float(sum(whole.shared_bytes))
        self._least_room = self._least_that_fits()
        self.chosen = cache(self._chosen)
        self.least_s = cache(self._least_s)

    def chain(self, again: ComputedAgain) -> ChainCosts:
        """What planning reads where these are computed again."""
        return self._profile.at(self._size, again.layers, again.part)

    def held_bytes(self, again: ComputedAgain) -> tuple[float, float]:
        """What is held of activations from forward to backward, and the most that is made of one
        layer's."""
        made = max(self.made_bytes(i, again) for i in range(len(self._spared)))
        return float(sum(self.chain(again).saved_bytes)), made

    def made_bytes(self, layer: int, again: ComputedAgain) -> float:
        """What is there of its activations only while they are computed again."""
        own = self._spared[layer]
        if layer in again.layers:
            return own.transient
        return own.part_transient if layer in again.part else 0.0

    def fitting(
        self, sure: float, most: float, memory: float, fits: Callable[[ComputedAgain], bool]
    ) -> ComputedAgain:
        """As little as ``fits``, where ``sure`` bytes of room are enough and more than ``most`` are
        not there; to ``NEAR`` of a device's ``memory``. Where nothing fits, what takes least."""
        found = self.chosen(most)
        if fits(found):
            return found
        low, high = sure - self._shared_bytes, most  # ``chosen`` counts so much less at most
        found = self.chosen(low)
        while high - low > max(1.0, NEAR * memory):
            middle = (low + high) / 2
            if fits(again := self.chosen(middle)):
                found, low = again, middle
            else:
                high = middle
        return found

    def _chosen(self, room: float) -> ComputedAgain:
        """With the fewest seconds that fit ``room`` bytes, of what is held from forward to backward
        and of the most that is made of a layer; where none do, with about the least bytes.

        What passes by (``ProfiledLayer.passed_bytes``) is counted as if every layer shared it with
        the one before: what ``chain`` says is held may be more.
        """
        found = least_work(self._spared, self._saved_bytes - max(room, self._least_room))
        assert found is not None
        return ComputedAgain(found.again, found.selective)

    def _least_s(self, room: float) -> float:
        """Seconds in less of which nothing is computed again so that what is held from forward to
        backward fits ``room``; infinite where nothing does."""
        return least_seconds(self._spared, self._saved_bytes - room)

    def _least_that_fits(self) -> float:
        """Room that is enough if layers that make no more than some do are computed again."""
        rooms = [self._saved_bytes]
        for most in {t for each in self._spared for t in (each.transient, each.part_transient)}:
            allowed = [each.with_at_most(most).ways for each in self._spared]
            spared = sum(max((way.num_bytes for way in ways), default=0.0) for ways in allowed)
            rooms.append(self._saved_bytes - spared + most)
        return min(rooms)
