"""Beam search for the best path through the blocks; exhaustive if the beam is wide enough.

A partial path knows its state and the load of each device. It is pruned if a device exceeds its
memory, or if its lower bound exceeds a given bound. The lower bound is the larger of the busiest
device's load and the mean load, with all remaining work, over devices that still take blocks. If
more than ``width`` partial paths remain, the most promising of every state are kept, and the search
is no longer complete.

A skip between devices is charged to both when the layer that pops it is placed. The device that
pushed it is known by then.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.multi_chunk.states import StateSpace
from megatron_pulse.planner.partition.pair_costs import SLACK, Bools, Ints, SkipSums, ragged


@dataclass(frozen=True)
class BeamResult:
    """Complete paths, as the states at which their blocks end, and the measure of each.

    ``complete``: no path below the bound was left out. ``work``: number of edges visited.
    """

    ends: Ints
    value: Floats
    complete: bool
    work: int


@dataclass
class _Beginnings:
    """Partial paths: state, loads of devices, skips, and states at which blocks ended.

    ``worth`` is the measure if it is not a device's. ``skips[i, d, k]`` is the weight of skips that
    device d has pushed, among the first k skips to be popped.
    """

    place: Ints
    load: Floats
    held: Floats
    worth: Floats
    skips: Floats
    ends: Ints

    def only(self, which: Ints | Bools) -> _Beginnings:
        """Subset of the partial paths."""
        return _Beginnings(*(getattr(self, field.name)[which] for field in fields(self)))


class Beam:
    """Search for paths that minimise ``measure`` (a measure of goals, or "memory").

    Unless ``limited``, paths may exceed the memory.
    """

    def __init__(
        self, walks: StateSpace, measure: str, collocate: bool, limited: bool = True
    ) -> None:
        self.walks, self.measure, self.collocate = walks, measure, collocate
        self.limited = limited
        self._pushed, self._popped = self._skips()
        costs = walks.many.costs
        self._skip_bytes = SkipSums(costs, [skip.num_bytes for skip in costs.skips])
        after = [[b.device for b in walks.blocks[at:]] for at in range(1, len(walks.blocks) + 1)]
        self._open = [sorted(set(devices)) for devices in after]
        self._left = self._left_for_open()

    def search(self, bound: float, width: int) -> BeamResult:
        """Find paths with a measure up to ``bound``, keeping at most ``width`` after each block."""
        num_devices = self.walks.many.placement.num_devices
        begun = _Beginnings(
            np.array([self.walks.start]),
            np.zeros((1, num_devices)),
            np.zeros((1, num_devices)),
            np.zeros(1),
            np.zeros((1, num_devices, self._pushed.shape[1])),
            np.zeros((1, 0), dtype=np.int64),
        )
        complete, work = True, 0
        for at in range(len(self.walks.blocks)):
            begun, looked = self._next(begun, at, bound)
            work += looked
            if len(begun.place) > width:
                begun, complete = self._promising(begun, at, width), False
        return BeamResult(
            begun.ends, self._least(begun, len(self.walks.blocks) - 1), complete, work
        )

    def _skips(self) -> tuple[Floats, Ints]:
        """Prefix sums of skip weights, and the number of skips popped before each layer.

        ``[c, k]`` is the weight of those of the first k skips that are pushed before layer c.
        """
        costs, link = self.walks.many.costs, self.walks.many.link
        num = len(costs.names)
        skips = sorted(costs.skips, key=lambda skip: skip.destination)
        if self.walks.paired:  # every skip stays on its device
            weights = [0.0 for _ in skips]
        elif self.collocate:
            weights = [1.0 for _ in skips]
        elif self.measure == "load":
            weights = [link.time_s(skip.num_bytes) for skip in skips]
        else:
            weights = [float(skip.num_bytes * (self.measure == "bytes")) for skip in skips]
        if not any(weights):
            skips, weights = [], []
        pushed = np.zeros((num + 1, len(skips) + 1))
        for k, (skip, weight) in enumerate(zip(skips, weights, strict=True)):
            pushed[skip.source + 1 :, k + 1 :] += weight
        popped = np.searchsorted([skip.destination for skip in skips], np.arange(num + 1))
        return pushed, popped

    def _left_for_open(self) -> list[Floats]:
        """Lower bound on the remaining work of all devices, after each block, for every state."""
        walks = self.walks
        sent: Floats = np.zeros(len(walks.left))
        left = []
        for at in range(len(walks.blocks) - 1, -1, -1):
            if self.measure == "load":
                left.append(walks.left_compute + sent)
                block = walks.blocks[at]
                further = 4 * walks.sent_s * (at + 1 < len(walks.blocks)) + sent
                sent = np.full(len(walks.left), np.inf)
                some = np.flatnonzero(np.diff(block.first))
                if len(some):
                    sent[some] = np.minimum.reduceat(further[block.end], block.first[some])
            else:
                left.append(self._least_held(at))
        return left[::-1]

    def _least_held(self, at: int) -> Floats:
        rule = self.walks.many.memory
        if rule is None:
            return np.zeros(len(self.walks.left))
        each = rule.bytes_per_parameter * self.walks.left_parameters
        result: Floats = each + min(rule.in_flight) * self.walks.left_saved
        return result

    def _least(self, begun: _Beginnings, at: int) -> Floats:
        """Lower bound on the measure of all paths that continue ``begun`` after block ``at``."""
        if self.measure not in ("load", "memory"):
            return begun.worth
        has = begun.load if self.measure == "load" else begun.held
        least: Floats = has.max(axis=1)
        if still := self._open[at]:
            mean = (has[:, still].sum(axis=1) + self._left[at][begun.place]) / len(still)
            least = np.maximum(least, mean)
        return least

    def _fits(self, begun: _Beginnings, at: int, device: int) -> Bools:
        """True if the device's memory suffices, and the open devices' may for the remaining
        layers."""
        rule, still = self.walks.many.memory, self._open[at]
        if rule is None or not self.limited:
            return np.ones(len(begun.place), dtype=np.bool_)
        limit = rule.limit_bytes * SLACK
        fits: Bools = begun.held[:, device] <= limit
        if still:
            least = begun.held[:, still].sum(axis=1) + self._least_held(at)[begun.place]
            fits &= least <= limit * len(still)
        return fits

    def _next(self, begun: _Beginnings, at: int, bound: float) -> tuple[_Beginnings, int]:
        """Extend all partial paths by one block; also return the number of extensions visited."""
        walks, block = self.walks, self.walks.blocks[at]
        device = block.device
        owner, edge = ragged(*self._window(begun, at, bound))
        end = block.end[edge]
        load, held, worth = begun.load[owner], begun.held[owner], begun.worth[owner]
        held[:, device] += block.held[edge]
        if self.measure == "load":
            load[:, device] += block.compute[edge]
            if at + 1 < len(walks.blocks):
                load[:, [device, walks.blocks[at + 1].device]] += 2 * walks.sent_s[end][:, None]
        elif self.measure == "bytes":
            if at + 1 < len(walks.blocks) and walks.blocks[at + 1].device != device:
                worth += walks.sent_bytes[end]
        elif self.measure == "stage":
            worth = np.maximum(worth, block.even.value[block.begin[edge], end])
        together = self._charge_skips(begun, owner, end, at, load, worth)
        further = _Beginnings(end, load, held, worth, owner, edge)
        keep = together & self._fits(further, at, device)
        keep &= self._least(further, at) <= bound
        further = further.only(keep)
        owner, end = owner[keep], end[keep]
        further.skips = begun.skips[owner]
        if self._pushed.shape[1] > 1:
            rows = walks.left[end], walks.left[begun.place[owner]]
            further.skips[:, device] += self._pushed[rows[0]] - self._pushed[rows[1]]
        further.ends = np.concatenate([begun.ends[owner], end[:, None]], axis=1)
        return further, len(edge)

    def _window(self, begun: _Beginnings, at: int, bound: float) -> tuple[Ints, Ints]:
        """First and last edges from each state that computing time alone does not exclude."""
        walks, block = self.walks, self.walks.blocks[at]
        first, last = block.first[begun.place], block.first[begun.place + 1]
        if self.measure != "load" or bound == np.inf:
            return first, last
        room = bound * SLACK - begun.load[:, block.device]
        most = np.searchsorted(block.key, walks.key(begun.place, room), "right")
        last = np.clip(most, first, last)
        if block.closes:
            still = self._open[at]
            spare = len(still) * bound * SLACK - begun.load[:, still].sum(axis=1)
            need = walks.left_compute[begun.place] - spare
            least = np.searchsorted(block.key, walks.key(begun.place, need), "left")
            first = np.clip(least, first, last)
        return first, last

    def _charge_skips(
        self,
        begun: _Beginnings,
        owner: Ints,
        end: Ints,
        at: int,
        load: Floats,
        worth: Floats,
    ) -> Bools:
        """Add the costs of skips popped in a block; with ``collocate``, tell if all are from its
        device."""
        device = self.walks.blocks[at].device
        together: Bools = np.ones(len(owner), dtype=np.bool_)
        if self._pushed.shape[1] == 1:
            return together
        cuts = self.walks.left[begun.place[owner]], self.walks.left[end]
        first, last = self._popped[cuts[0]], self._popped[cuts[1]]
        for other in range(load.shape[1]):
            if other == device:
                continue
            crossing = begun.skips[owner, other, last] - begun.skips[owner, other, first]
            if self.collocate:
                together &= crossing == 0
            elif self.measure == "load":
                load[:, other] += 2 * crossing
                load[:, device] += 2 * crossing
            else:
                worth += crossing
        if self.measure == "bytes" and at and self.walks.blocks[at - 1].device != device:
            worth -= self._skip_bytes.merged(*cuts)
        return together

    def _promising(self, begun: _Beginnings, at: int, width: int) -> _Beginnings:
        """Keep ``width`` partial paths: the best of every state, then the second best, and so on.

        Within a state the order is by lower bound, then by evenness of loads.
        """
        least = self._least(begun, at)
        spread = np.zeros(len(least))
        for has in (begun.load, begun.held):
            spread += (has**2).sum(axis=1) / max((has**2).sum(axis=1).mean(), 1e-300)
        order = np.lexsort((spread, least, begun.place))
        place = begun.place[order]
        starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
        rank = np.arange(len(place)) - np.repeat(starts, np.diff(np.append(starts, len(place))))
        return begun.only(order[np.lexsort((least[order], rank))[:width]])
