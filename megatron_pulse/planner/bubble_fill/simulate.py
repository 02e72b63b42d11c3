"""Timeline of a filled step, with components slower or faster than planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_pulse.planner.bubble_fill.components import Slice
from megatron_pulse.planner.bubble_fill.problem import FilledOrder, FillProblem
from megatron_pulse.planner.schedule.check.simulate import dependency, duration_of, play
from megatron_pulse.planner.schedule.operations import Operation

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
        self.deps: dict[Item, list[tuple[Item, float]]] = {}
        for slice_, device in home.items():
            first = slice_.layers[0]
            sources = (
                [(slice_.component, first - 1)]
                if first
                else [(c, len(problem.components[c].layers) - 1) for c in problem.before[slice_[0]]]
            )
            found: dict[Item, float] = {}
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
        self._seconds = {slice_: slice_.time_s(problem.components) for slice_ in home}

    def before(self, item: Item) -> Iterator[tuple[Item, float]]:
        """Predecessors of ``item``, each with the lag from its end to the start of ``item``."""
        if isinstance(item, Slice):
            yield from self.deps[item]
        else:
            step = self.problem.step
            required = dependency(item, step.placement)
            if required is not None:
                yield required, step.lag(required.stage, item.stage)

    def run(self, factor: float = 1.0) -> FilledTimeline:
        """Simulate: every device runs its next item as early as possible, slices ``factor`` times
        as long.

        A device sends results one after another. Raises ValueError for a deadlock.
        """

        own = duration_of(self.problem.step, self.problem.schedule)

        def duration(item: Item) -> float:
            return factor * self._seconds[item] if isinstance(item, Slice) else own(item)

        start, end, stuck = play(self.filled.order, self.before, duration)
        if stuck:
            said = "; ".join(f"device {d} waits at {item}" for d, item in stuck)
            raise ValueError(f"the filled step deadlocks: {said}")
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
