"""States and blocks of a search over cuts with several stages per device.

A state (``place``) is a cut: the layers before it are placed. A step takes the next stage. In a
mirrored placement with collocated skips a state is a pair of cuts. A step then takes a mirror pair
of stages, from the outside in. Consecutive steps on one device are a block:

    two waves, P = 2      stages     0  1  2  3  4  5  6  7
                          device     0  1  1  0  0  1  1  0
                          blocks    |--|-----|-----|-----|--|

Loads depend only on the ends of blocks, so a path (``StateSpace``) goes from block to block. The
cuts inside a block are chosen beforehand for each pair of ends: for the smallest largest stage, and
for the least memory. Bytes depend on inner cuts as well, because a skip that is the boundary tensor
is not sent again if the next stage pops it. For the measure of bytes every step can therefore be a
block of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_pulse.backbone.costs import Floats, running_sum
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from megatron_pulse.planner.partition.pair_costs import Bools, Ints


@dataclass
class InnerCuts:
    """Optimal inner cuts of a block; ``steps[k][v, w]`` is the value of its k-th step from v to w.

    ``add`` combines the values of two steps; infinite values are illegal.
    """

    steps: list[Floats]
    add: np.ufunc

    @cached_property
    def value(self) -> Floats:
        """``[v, w]`` is the least value over all ways from state v to state w."""
        value = self.steps[0]
        for step in self.steps[1:]:
            least = np.full_like(value, np.inf)
            for middle in range(len(value)):
                begin = np.flatnonzero(np.isfinite(value[:, middle]))
                end = np.flatnonzero(np.isfinite(step[middle]))
                if len(begin) and len(end):
                    where = np.ix_(begin, end)
                    total = self.add(value[begin, middle][:, None], step[middle, end][None, :])
                    least[where] = np.minimum(least[where], total)
            value = least
        return value

    @property
    def possible(self) -> Bools:
        """``[v, w]`` is true if there is a way from state v to state w."""
        reach = np.isfinite(self.steps[0])
        for step in self.steps[1:]:
            # Float products are faster than boolean ones.
            reach = reach.astype(np.float32) @ np.isfinite(step).astype(np.float32) > 0
        return reach

    def places(self, begin: int, end: int) -> list[int]:
        """States between the steps on the best way from ``begin`` to ``end``."""
        value, before = self.steps[0][begin], []
        for step in self.steps[1:]:
            some = np.flatnonzero(np.isfinite(value))
            total = self.add(value[some][:, None], step[some])
            before.append(some[total.argmin(axis=0)])
            value = total.min(axis=0)
        found = [end]
        for last in reversed(before):
            found.append(int(last[found[-1]]))
        return found[:0:-1]


@dataclass(frozen=True)
class Block:
    """All ways to take one block.

    Edges join states and are sorted by state, then by computing time. The edges of state v are
    ``first[v] <= e < first[v + 1]``. ``closes`` is true if its device has no later block. ``key``
    orders all edges (see ``StateSpace.key``).
    """

    device: int
    closes: bool
    first: Ints
    begin: Ints
    end: Ints
    compute: Floats
    key: Floats
    held: Floats
    even: InnerCuts
    lean: InnerCuts


class StateSpace:
    """States and blocks of a chain over a placement; with ``stepwise`` every step is a block."""

    def __init__(
        self, many: BatchedEvaluator, closed: Bools | None = None, stepwise: bool = False
    ) -> None:
        costs, num, home = many.costs, len(many.costs.names), many.placement.device_of_stage
        self.many, self.paired = many, closed is not None
        self._home, self._stepwise = home, stepwise
        self._forward = running_sum(costs.forward_s)
        self._compute = self._forward + running_sum(costs.backward_s)
        rule = many.memory
        self._parameters = running_sum(costs.parameters if rule is None else rule.weighed(costs))
        self._saved = running_sum(costs.saved_bytes)
        if closed is None:
            self.left, self.right = np.arange(num + 1), np.full(num + 1, num)
            self.start, self.goal = 0, num
        else:
            self.left, self.right = np.nonzero(np.triu(closed))
            self.start = int(np.flatnonzero((self.left == 0) & (self.right == num))[0])
            # The last state stands for any middle: the two innermost stages are on one device.
            self.left, self.right = np.append(self.left, num), np.append(self.right, num)
            self.goal = len(self.left) - 1
        ends = np.array([*costs.boundary_bytes, 0], dtype=np.float64)
        ends[0] = 0
        seconds = np.array([many.link.time_s(size) for size in ends])
        self._send = seconds
        self.sent_s = self._at_ends(seconds)
        self.sent_bytes = self._at_ends(ends)
        self.left_compute = self._between(self._compute)
        self.left_parameters = self._between(self._parameters)
        self.left_saved = self._between(self._saved)
        self._middle = len(home) // 2 if self.paired else -1
        self.blocks = self._blocks()

    def cuts(self, ends: list[int], lean: bool) -> tuple[int, ...]:
        """Cuts of the path whose blocks end at the states ``ends``."""
        places = [self.start]
        for block, end in zip(self.blocks, ends, strict=True):
            places += [*(block.lean if lean else block.even).places(places[-1], end), end]
        if not self.paired:
            return tuple(places)
        places.pop()
        heads, tails = self.left[places], self.right[places]
        return (*map(int, heads), *map(int, tails[-2::-1]))

    def _at_ends(self, of_cut: Floats) -> Floats:
        """Sum of ``of_cut`` over the cuts of each state."""
        result: Floats = of_cut[self.left] + (of_cut[self.right] if self.paired else 0.0)
        result[self.goal] = 0.0
        return result

    def _between(self, running: Floats) -> Floats:
        """Sum over the layers that are not yet placed in each state."""
        result: Floats = running[self.right] - running[self.left]
        return result

    def _blocks(self) -> list[Block]:
        steps = self._middle if self.paired else len(self._home)
        runs: list[list[int]] = []
        for step in range(steps):
            if step and self._home[step] == self._home[step - 1] and not self._stepwise:
                runs[-1].append(step)
            else:
                runs.append([step])
        if self.paired:
            runs[-1].append(steps)  # from the middle to the goal
        found = []
        for run in runs:
            even = lean = InnerCuts([self._stage(k) for k in run], np.maximum)
            if self.many.memory is not None:
                lean = InnerCuts([self._held(k, self.many.memory) for k in run], np.add)
            found.append((even, lean))
        reach = np.arange(len(self.left)) == self.goal
        blocks: list[Block] = []
        for at in reversed(range(len(runs))):
            allowed = found[at][0].possible & reach
            reach = allowed.any(axis=1)
            device = self._home[runs[at][0]]
            closes = all(block.device != device for block in blocks)
            blocks.append(self._block(device, closes, allowed, *found[at]))
        return blocks[::-1]

    def _block(
        self, device: int, closes: bool, allowed: Bools, even: InnerCuts, lean: InnerCuts
    ) -> Block:
        begin, end = np.nonzero(allowed)
        compute = self.left_compute[begin] - self.left_compute[end]
        order = np.lexsort((compute, begin))
        begin, end, compute = begin[order], end[order], compute[order]
        held = lean.value[begin, end] if self.many.memory is not None else np.zeros(len(end))
        return Block(
            device,
            closes,
            np.searchsorted(begin, np.arange(len(self.left) + 1)),
            begin,
            end,
            compute,
            self.key(begin, compute),
            held,
            even,
            lean,
        )

    def key(self, place: Ints, compute: Floats) -> Floats:
        """Sort key of edges: by state, then by computing time (any finite value)."""
        total = self._compute[-1]
        result: Floats = place * (4 * total + 4) + np.clip(compute, -total - 1, 2 * total + 1)
        return result

    def _leaves(self, step: int) -> bool:
        """True if the next step is on another device."""
        home = self._home
        return 0 <= step < len(home) - 1 and home[step] != home[step + 1]

    def _stage(self, step: int) -> Floats:
        """``[v, w]`` is the largest stage of a step from state v to state w; infinite if
        illegal."""
        if step == self._middle:
            return self._closing()
        forward, left, right = self._forward, self.left, self.right
        sent = self._send * (self.many.lam * self._leaves(step))
        value = (forward + sent)[left][None, :] - forward[left][:, None]
        if self.paired:
            before = self._send * (self.many.lam * self._leaves(step - 1))
            back = (forward[right] + before[right])[:, None] - forward[right][None, :]
            value = np.maximum(value, back)
        value[~self._legal(step)] = np.inf
        return value

    def _held(self, step: int, rule: MemoryRule) -> Floats:
        """``[v, w]`` is the memory of a step from state v to state w in bytes; infinite if
        illegal."""
        if step == self._middle:
            return self._closing()
        left, right = self.left, self.right
        each = rule.bytes_per_parameter * self._parameters
        ahead = each + rule.in_flight[step] * self._saved
        value = ahead[left][None, :] - ahead[left][:, None]
        if self.paired:
            behind = each + rule.in_flight[len(self._home) - 1 - step] * self._saved
            value = value + behind[right][:, None] - behind[right][None, :]
        value[~self._legal(step)] = np.inf
        return value

    def _legal(self, step: int) -> Bools:
        left, right = self.left, self.right
        legal: Bools = left[None, :] > left[:, None]
        if self.paired:
            innermost = step == self._middle - 1
            legal &= right[None, :] < right[:, None]
            legal &= ((left == right) if innermost else (left < right))[None, :]
            legal[:, self.goal] = False
        return legal

    def _closing(self) -> Floats:
        """Step that takes no layers, from any middle to the goal."""
        value = np.full((len(self.left), len(self.left)), np.inf)
        value[np.flatnonzero(self.left[:-1] == self.right[:-1]), self.goal] = 0.0
        return value
