"""Schedules for which devices have room.

Caps of a schedule problem leave room for the most that any operation works with. What a schedule
holds at most is another thing (``peaks``): skips between stages of a device are in it, and what
works is counted beside what is held then. So one within its caps may be too much, mostly by less
than a percent; one that is made with caps lower by that fits, and is hardly longer::

    caps --> schedule --> peaks --> room? yes
     ^                               | no
     +---- lower by what is over ----+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import ge

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.cuts.lighter import LighterCuts
from megatron_pulse.planner.tune.memory.peaks import most_in_use
from megatron_pulse.planner.tune.stages import Stages

type Caps = tuple[float, ...] | None
"""Of a schedule problem"""

type Make = Callable[[ScheduleProblem], Sequence[tuple[Synthesis, Timeline]]]
"""Schedules of a problem, the soonest first, and when everything happens"""

LOWERED = 3
"""Times that caps are lowered by what devices have too much."""

_TIGHT = 1 + 1e-9


class WithRoom(LighterCuts):
    """A chain of whose schedules it is known what devices hold."""

    def with_room(
        self,
        config: Config,
        stages: Stages,
        problem: ScheduleProblem,
        make: Make,
        has_time: Callable[[], bool] = lambda: True,
    ) -> tuple[Synthesis, Timeline, tuple[float, ...], Caps]:
        """The first that ``make`` makes of the problem for which devices have room, what each has
        and its caps. Where there is none, caps are lowered by what was too much, up to ``LOWERED``
        times, while it ``has_time``; in the end it is the first of all, with room or without."""
        lowered, first = problem, None
        for _ in range(LOWERED + 1):
            for found, timeline in make(lowered):
                memory = self.held(config, stages, found.schedule)
                first = first or (found, timeline, memory, lowered.cap)
                if self.fit_in(memory):
                    return _of_problem(found, problem, lowered.cap), timeline, memory, lowered.cap
            caps = self._lower(stages, lowered.cap, memory, config.split)
            if caps is None or not has_time():
                break
            lowered = replace(lowered, cap=caps)
        assert first is not None
        return first

    def _lower(self, stages: Stages, caps: Caps, memory: Sequence[float], split: bool) -> Caps:
        """The caps without what devices had too much; None where too little would be left for one
        microbatch."""
        if caps is None:
            return None
        limit = self.cluster.usable_bytes
        lower = tuple(c - max(0.0, used - limit) for c, used in zip(caps, memory, strict=True))
        least = stages.per_device(stages.kept_bytes(split))
        return lower if all(map(ge, lower, least)) else None

    def held(self, config: Config, stages: Stages, schedule: Schedule) -> tuple[float, ...]:
        """The most that each device holds in the schedule."""
        times = self._times_at(config.micro_batch_size)
        parts = [self.parts(config, i) for i in range(len(times))]
        return stages.memory_bytes(most_in_use(stages, times, parts, schedule))

    def fit_in(self, memory: tuple[float, ...]) -> bool:
        """Whether each device has so many bytes."""
        return max(memory) <= self.cluster.usable_bytes * _TIGHT


def _of_problem(found: Synthesis, problem: ScheduleProblem, caps: Caps) -> Synthesis:
    """A schedule that was made with lower ``caps`` as one of the problem, whose bound is not
    theirs."""
    if caps == problem.cap:
        return found
    known, least = found.certificate, lower_bound(problem, work=0.0)
    proved = known.makespan <= least * _TIGHT
    return replace(found, certificate=replace(known, lower_bound=least, proved=proved))
