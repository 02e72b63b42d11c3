"""Timeline of a filled step, with components slower or faster than planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_pulse.planner.bubble_fill.components import Slice
from megatron_pulse.planner.bubble_fill.problem import FilledOrder, FillProblem
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.schedule.simulate_kernel import extended, joined, play

type Item = Operation | Slice


@dataclass(frozen=True)
class FilledTimeline:
    """Seconds of all starts and ends, of the last result's arrival (``results``), and of the whole
    step."""

    start: dict[Item, float]
    end: dict[Item, float]
    results: float
    makespan: float


class FilledSimulation:
    """Filled step that can be simulated repeatedly."""

    def __init__(self, problem: FillProblem, filled: FilledOrder) -> None:
        self.problem, self.filled = problem, filled
        home = {slice_: device for device, slice_ in filled.slices}
        owner: dict[tuple[int, int, int], Slice] = {}
        for slice_ in home:
            for layer in range(*slice_.layers):
                for sample in range(*slice_.samples):
                    owner[slice_.component, layer, sample] = slice_
        self.deps: dict[Slice, list[tuple[Slice, float]]] = {}
        for slice_, device in home.items():
            first = slice_.layers[0]
            sources = (
                [(slice_.component, first - 1)]
                if first
                else [(c, len(problem.components[c].layers) - 1) for c in problem.before[slice_[0]]]
            )
            found: dict[Slice, float] = {}
            for component, layer in sources:
                shared: dict[Slice, int] = defaultdict(int)
                for sample in range(*slice_.samples):
                    shared[owner[component, layer, sample]] += 1
                for source, count in shared.items():
                    away = home[source] != device
                    if first:
                        lag = problem.lag_s(component, layer, count)
                    else:
                        lag = problem.result_lag_s(component, count)
                    found[source] = lag if away else 0.0
            self.deps[slice_] = list(found.items())
        self.home = home
        operations, waits, self._operations_s = problem.arrays
        num = len(self._operations_s)
        number: dict[Item, int] = {slice_: i for i, slice_ in enumerate(home, num)}
        number.update(operations.index.items())
        self._number = number
        rows = [[(number[source], lag) for source, lag in self.deps[slice_]] for slice_ in home]
        self._waits = extended(waits, rows)
        lines = [[number[item] for item in line] for line in filled.order]
        self._lines = joined([*lines, *operations.side_items])
        self._slices_s = np.array([slice_.time_s(problem.components) for slice_ in home])

    def run(self, factor: float = 1.0) -> FilledTimeline:
        """Simulate: every device runs its next item as early as possible, slices ``factor`` times
        as long.

        A device sends results one after another. Raises ValueError for a deadlock.
        """
        duration = np.concatenate((self._operations_s, factor * self._slices_s))
        starts, ended = play(*self._lines, self._waits, duration)
        if not ended.all():
            said = "; ".join(
                f"device {d} waits at {stuck[0]}"
                for d, line in enumerate(self.filled.order)
                if (stuck := [item for item in line if not ended[self._number[item]]])
            )
            raise ValueError(f"the filled step deadlocks: {said}")
        times = starts.tolist(), (starts + duration).tolist()
        start, end = ({item: t[i] for item, i in self._number.items()} for t in times)
        results = results_at(self, end)
        return FilledTimeline(start, end, results, max(results, max(end.values())))


def results_at(step: FilledSimulation, end: Mapping[Item, float]) -> float:
    """Time at which every result has reached its consumers, from the ends of slices."""
    there = 0.0
    free = [0.0] * step.problem.num_devices
    for slice_, device in sorted(step.home.items(), key=lambda item: end[item[0]]):
        component = step.problem.components[slice_.component]
        if slice_.layers[1] < len(component.layers):
            continue
        for _ in {*component.consumers} - {device}:
            lag = step.problem.result_lag_s(slice_.component, slice_.num_samples)
            free[device] = max(free[device], end[slice_]) + lag
        there = max(there, free[device], end[slice_])
    return there
