"""Batched evaluation of cuts of one chain over one placement: ``evaluate`` for arrays of cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts, Floats, running_sum
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.pair_costs import Ints


@dataclass(frozen=True)
class Measures:
    """One value per row of cuts; ``apart`` counts skips whose ends are on two devices."""

    load: Floats
    stage: Floats
    bytes: Floats
    memory: Floats
    apart: Ints


@dataclass
class BatchedEvaluator:
    """Evaluator for rows of cuts of ``costs`` over ``placement``; each row goes from 0 to the
    end."""

    costs: ChainCosts
    placement: Placement
    link: Link
    lam: float
    memory: MemoryRule | None

    def __post_init__(self) -> None:
        costs, home = self.costs, np.array(self.placement.device_of_stage)
        self._home = home
        self._on_device = (home[:, None] == np.arange(self.placement.num_devices)).astype(float)
        self._leaves = home[:-1] != home[1:]
        self._forward = running_sum(costs.forward_s)
        self._compute = self._forward + running_sum(costs.backward_s)
        rule = self.memory
        self._parameters = running_sum(costs.parameters if rule is None else rule.weighed(costs))
        self._saved = running_sum(costs.saved_bytes)
        self._bytes = np.array(costs.boundary_bytes, dtype=np.float64)
        self._send = np.array([self.link.time_s(size) for size in costs.boundary_bytes])
        self._sources = np.array([s.source for s in costs.skips], dtype=np.int64)
        self._destinations = np.array([s.destination for s in costs.skips], dtype=np.int64)
        self._skip_bytes = np.array([s.num_bytes for s in costs.skips], dtype=np.float64)
        self._skip_s = np.array([self.link.time_s(s.num_bytes) for s in costs.skips])

    def measure(self, cuts: Ints) -> Measures:
        """Measures of every row of ``cuts``."""
        begin, end, inner = cuts[:, :-1], cuts[:, 1:], cuts[:, 1:-1]
        sent = np.zeros((len(cuts), len(self._home) + 1))
        sent[:, 1:-1] = self._send[inner] * self._leaves
        forward = self._forward[end] - self._forward[begin]
        messages = sent[:, :-1] + sent[:, 1:]
        load = (self._compute[end] - self._compute[begin] + 2 * messages) @ self._on_device
        moved = (self._bytes[inner] * self._leaves).sum(axis=1)
        apart: Ints = np.zeros(len(cuts), dtype=np.int64)
        if len(self._sources):
            stage_of = _stages_of(cuts)
            rows = np.arange(len(cuts))[:, None]
            sources = stage_of[rows, self._sources]
            destinations = stage_of[rows, self._destinations]
            from_, to = self._home[sources], self._home[destinations]
            crosses = from_ != to
            merged = (destinations == sources + 1) & (end[rows, sources] == self._sources + 1)
            apart = crosses.sum(axis=1)
            moved = moved + (crosses & ~merged) @ self._skip_bytes
            for device in range(self.placement.num_devices):
                load[:, device] += 2 * (((from_ == device) ^ (to == device)) @ self._skip_s)
        return Measures(
            load.max(axis=1),
            (forward + self.lam * sent[:, 1:]).max(axis=1),
            moved,
            self._held(begin, end),
            apart,
        )

    def _held(self, begin: Ints, end: Ints) -> Floats:
        """Bytes on the fullest device."""
        rule = self.memory
        if rule is None:
            return np.zeros(len(begin))
        held = rule.bytes_per_parameter * (self._parameters[end] - self._parameters[begin])
        held += np.array(rule.in_flight) * (self._saved[end] - self._saved[begin])
        result: Floats = (held @ self._on_device).max(axis=1)
        return result


def _stages_of(cuts: Ints) -> Ints:
    """``[i, l]`` is the stage that holds layer l in the i-th row of cuts."""
    widths = np.diff(cuts, axis=1)
    stages = np.tile(np.arange(widths.shape[1]), len(cuts))
    return np.repeat(stages, widths.ravel()).reshape(len(cuts), -1)
