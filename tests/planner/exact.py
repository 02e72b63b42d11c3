"""The shortest schedule of a tiny problem, by trying every order of operations."""

from __future__ import annotations

from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.jobshop import job_shop


def optimum(problem: ScheduleProblem) -> int:
    """Makespan in the problem's unit; times must be whole numbers. Some dozen operations at most.

    Orders grow by one operation at a time. Two ways to the same set of done operations differ only
    in when devices are free and results ready: a way that is later in all of them is dropped.
    """
    shop = job_shop(problem)
    count, devices = problem.num_microbatches, problem.placement.num_devices
    classes = shop.num_classes
    start = ((0,) * classes, (0,) * (devices + len(shop.duration)))
    layer: dict[tuple[int, ...], set[tuple[int, ...]]] = {start[0]: {start[1]}}
    for _ in shop.duration:
        following: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for steps, ways in layer.items():
            for k in range(classes):
                i, device = k * count + steps[k], shop.device[k * count]
                if steps[k] == count or any(
                    j % count >= steps[j // count] for j, _ in shop.before[i]
                ):
                    continue
                live = sum(
                    steps[c] * shop.delta[c * count]
                    for c in range(classes)
                    if shop.device[c * count] == device
                )
                if live + shop.delta[i] > shop.cap[device]:
                    continue
                done = (*steps[:k], steps[k] + 1, *steps[k + 1 :])
                found = following.setdefault(done, set())
                for way in ways:
                    ready = max((way[devices + j] + lag for j, lag in shop.before[i]), default=0)
                    end = max(ready, way[device]) + shop.duration[i]
                    new = list(way)
                    new[device] = new[devices + i] = end
                    found.add(tuple(new))
        layer = {done: _best(ways) for done, ways in following.items()}
    (ways,) = layer.values()
    return min(max(way[:devices]) for way in ways)


def _best(ways: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for way in sorted(ways):
        if not any(all(a <= b for a, b in zip(old, way, strict=True)) for old in kept):
            kept.append(way)
    return set(kept)
