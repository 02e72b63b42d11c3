"""Which layers are computed again where not all activations fit, on a device with all layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.memory.knapsack import Spared, least_seconds
from megatron_pulse.planner.tune.sharded.in_turn import Handling, Room, least_in_turn
from megatron_pulse.profile.profile import Profile


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
        self._handlings = [self._handlings_of(i, whole, part) for i in every]
        self._spared = [
            Spared(
                i,
                whole.backward_s[i] - costs.backward_s[i],
                costs.saved_bytes[i] - whole.saved_bytes[i],
                0.0,
                part_s=part.backward_s[i] - costs.backward_s[i],
                part_bytes=costs.saved_bytes[i] - part.saved_bytes[i],
            )
            for i in every
        ]
        self.chosen = cache(self._chosen)
        self.least_s = cache(self._least_s)

    def chain(self, again: ComputedAgain) -> ChainCosts:
        """What planning reads where these are computed again."""
        return self._profile.at(self._size, again.layers, again.part)

    def made_bytes(self, layers: Iterable[int], again: ComputedAgain) -> float:
        """The most that neighbouring ``layers`` make anew in their backward, beyond what is held of
        them: those behind have let go of theirs."""
        chain, most, gone = self.chain(again), 0.0, 0.0
        for i in reversed(list(layers)):
            way = int(i in again.part) or 2 * (i in again.layers)
            most = max(most, self._handlings[i][way].made - gone)
            gone += chain.saved_bytes[i]
        return most

    def needed_bytes(self, again: ComputedAgain) -> float:
        """The most that a microbatch's activations take."""
        every = range(len(self._handlings))
        return float(sum(self.chain(again).saved_bytes)) + self.made_bytes(every, again)

    def may_fit(self, rooms: Iterable[Room]) -> bool:
        """Whether anything can: with the least of each layer that has room."""
        held = 0.0
        for ways, room in zip(self._handlings, rooms, strict=True):
            sums = [(held + way.held - way.shared, way.made) for way in ways]
            fits = [now for now, made in sums if now <= room.held and now + made <= room.making]
            if not fits:
                return False
            held = min(fits)
        return True

    def _handlings_of(self, i: int, whole: ChainCosts, part: ChainCosts) -> tuple[Handling, ...]:
        """A layer's, kept, of what is cheap, and all computed again."""
        saved, shared = float(self.costs.saved_bytes[i]), float(whole.shared_bytes[i])
        back_s, held = self.costs.backward_s[i], float(part.saved_bytes[i])
        return (
            Handling(0.0, saved),
            Handling(part.backward_s[i] - back_s, held, saved - held),
            Handling(
                whole.backward_s[i] - back_s,
                whole.saved_bytes[i] + shared,
                float(whole.again_bytes[i]),
                True,
                shared,
            ),
        )

    def _chosen(self, rooms: tuple[Room, ...]) -> ComputedAgain:
        """With about the fewest seconds that fit each layer's room; where none do, the least that
        is held."""
        sums = accumulate(ways[0].held for ways in self._handlings)
        if all(held <= min(room) for held, room in zip(sums, rooms, strict=True)):
            return ComputedAgain(frozenset(), frozenset())
        found = least_in_turn(self._handlings, rooms)
        if found is None:
            found = [min(range(3), key=lambda w: (ways[w].held, w)) for ways in self._handlings]
        of = (frozenset(i for i, number in enumerate(found) if number == way) for way in (2, 1))
        return ComputedAgain(*of)

    def _least_s(self, room: float) -> float:
        """Seconds in less of which nothing is computed again so that what is held from forward to
        backward fits ``room``; infinite where nothing does."""
        return least_seconds(self._spared, sum(self.costs.saved_bytes) - room)
