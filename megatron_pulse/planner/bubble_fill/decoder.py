"""Decoder: a filled step from a draft of priorities and margins.

Bubbles are filled in order of their start times, each by a knapsack over prefixes of the chains
that are ready (``knapsack``). The rest follows each device's last operation (``tail``).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.bubble_fill.components import Slice
from megatron_pulse.planner.bubble_fill.knapsack import prefixes
from megatron_pulse.planner.bubble_fill.leftover_work import (
    RemainingJob,
    list_schedule,
    wrap_around,
)
from megatron_pulse.planner.bubble_fill.problem import Bubble, FilledOrder, FillProblem, merged
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation

ALIKE, MOST = 4, 12
"""Maximum number of identical jobs, and of all jobs, per knapsack."""
FURTHEST = 1


@dataclass(frozen=True)
class Draft:
    """Decisions of the search.

    Component c runs in blocks of ``counts[c]`` samples. A job is one block through all layers; jobs
    of larger ``priority`` come first. ``margin[g]`` of bubble g (order of ``closed_gaps``) stays
    free, as a share of its content. A negative margin overfills the bubble and delays later
    operations. ``homes[c]`` may host component c.

    ``shuffle[g]`` is 0, or a seed that orders some jobs of the bubble anew, or ``FURTHEST``: the
    most advanced jobs first, wherever they are. ``tail`` are seeds of a list schedule after the
    last operations, in place of the spread to even ends. With ``moving`` a job may continue on any
    device.
    """

    counts: tuple[int, ...]
    priority: tuple[float, ...]
    margin: tuple[float, ...]
    shuffle: tuple[int, ...]
    tail: tuple[int, ...]
    homes: tuple[frozenset[int], ...]
    moving: bool = True


@dataclass(slots=True)
class SampleJob:
    """SampleJob: a block of samples on its way through a component's layers."""

    component: int
    samples: tuple[int, int]
    seconds: list[float]
    priority: float
    deps: list[SampleJob]
    held: float
    device: int = -1
    done: int = 0
    ready: float = 0.0

    @property
    def num_samples(self) -> int:
        """Samples of the block."""
        return self.samples[1] - self.samples[0]

    @property
    def is_done(self) -> bool:
        """True if all layers have run."""
        return self.done == len(self.seconds)


def closed_gaps(problem: FillProblem) -> list[Bubble]:
    """Bubbles of all devices that have an end, in order of their start times."""
    return sorted(gap for gaps in problem.gaps for gap in gaps[:-1])


def num_jobs(problem: FillProblem, counts: tuple[int, ...]) -> int:
    """Number of jobs for these block sizes."""
    return sum(math.ceil(problem.num_samples / count) for count in counts)


class Decoder:
    """Decoder of drafts for one problem.

    ``looked`` counts the jobs and layers examined, ``simulated`` the items of simulated steps. Both
    measure the work.
    """

    def __init__(self, problem: FillProblem) -> None:
        self.problem = problem
        self.closed = closed_gaps(problem)
        self.looked = self.simulated = 0
        self._seconds: dict[tuple[int, int], list[float]] = {}

    def fill(self, draft: Draft) -> FilledOrder:
        """Filled step of a draft. Memory is not checked."""
        jobs = self._jobs(draft)
        slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        room = self._room(draft)
        for gap, margin, seed in zip(self.closed, draft.margin, draft.shuffle, strict=True):
            line = slices[gap.device, gap.position]
            mixed = jobs
            if seed == FURTHEST:
                mixed = sorted(jobs, key=lambda job: -job.done / len(job.seconds))
            elif seed:
                chance = random.Random(seed)
                mixed = chance.sample(jobs, chance.randint((len(jobs) + 1) // 2, len(jobs)))
            self._fill_gap(gap, 1 + margin, mixed, room, draft, line, not seed)
        rest = [
            RemainingJob(job.component, job.samples, job.done, job.seconds, job.device, job.ready)
            for job in jobs
            if not job.is_done
        ]
        starts = self._starts(slices, min(draft.margin, default=0.0))
        if draft.tail:
            lines = list_schedule(self.problem, rest, draft.homes, starts, draft.moving, draft.tail)
        else:
            lines = wrap_around(self.problem, rest, draft.homes, starts, draft.moving)
        for device, line in enumerate(lines):
            slices[device, len(self.problem.schedule.order[device])] += line
        return merged(self.problem, slices)

    def _starts(
        self, slices: Mapping[tuple[int, int], Sequence[Slice]], least_margin: float
    ) -> list[float]:
        """Time at which each device has finished all before its open-ended bubble."""
        if least_margin >= 0:
            return [gaps[-1].start for gaps in self.problem.gaps]
        step = FilledSimulation(self.problem, merged(self.problem, slices))
        self.simulated += sum(map(len, step.filled.order))
        end = step.run().end
        return [end[line[-1]] if line else 0.0 for line in step.filled.order]

    def _jobs(self, draft: Draft) -> list[SampleJob]:
        problem = self.problem
        by_component: dict[int, list[SampleJob]] = {}
        keys = iter(draft.priority)
        blocks = {}
        for c, component in enumerate(problem.components):
            blocks[c] = [
                (block, next(keys))
                for block in component.divided(problem.num_samples, draft.counts[c])
            ]
        for c in sorted(blocks, key=problem.levels.__getitem__):
            component = problem.components[c]
            most = max(layer.output_bytes for layer in component.layers)
            by_component[c] = [
                SampleJob(
                    c,
                    block,
                    self._times(c, block[1] - block[0]),
                    key,
                    [
                        job
                        for b in problem.before[c]
                        for job in by_component[b]
                        if job.samples[0] < block[1] and block[0] < job.samples[1]
                    ],
                    most * (block[1] - block[0]),
                )
                for block, key in blocks[c]
            ]
        jobs = [job for mine in by_component.values() for job in mine]
        return sorted(jobs, key=lambda job: -job.priority)

    def _times(self, component: int, count: int) -> list[float]:
        key = component, count
        if key not in self._seconds:
            layers = self.problem.components[component].layers
            self._seconds[key] = [layer.time_s(count) for layer in layers]
        return self._seconds[key]

    def _room(self, draft: Draft) -> list[float]:
        """Bytes per device that open jobs may hold between their slices."""
        problem = self.problem
        if problem.free_bytes is None:
            return [math.inf] * problem.num_devices
        room = []
        for device, free in enumerate(problem.free_bytes):
            hosted = [c for c, home in enumerate(draft.homes) if device in home]
            running = max(
                (
                    layer.activation_bytes * draft.counts[c]
                    for c in hosted
                    for layer in problem.components[c].layers
                ),
                default=0.0,
            )
            parameters = sum(problem.components[c].parameter_bytes for c in hosted)
            room.append(free - parameters - running - problem.results_on(device))
        return room

    def _fill_gap(
        self,
        gap: Bubble,
        scale: float,
        jobs: list[SampleJob],
        room: list[float],
        draft: Draft,
        line: list[Slice],
        local: bool,
    ) -> None:
        now, device = gap.start, gap.device
        while now < gap.end:
            at = [(job, self._ready(job, device)) for job in jobs if self._may(job, device, draft)]
            options = self._options(
                [job for job, when in at if when <= now + 1e-12],
                device,
                room,
                draft if local else None,
            )
            chains = [job.seconds[job.done :] for job in options]
            self.looked += len(jobs) + sum(map(len, chains))
            taken = prefixes((gap.end - now) / scale, chains)
            if not any(taken):
                later = [when for _, when in at if now + 1e-12 < when < gap.end]
                now = min(later, default=gap.end)
                continue
            for job, count in zip(options, taken, strict=True):
                if count:
                    now += scale * sum(job.seconds[job.done : job.done + count])
                    _put(line, job, count)
                    if job.device not in (-1, device):
                        room[job.device] += job.held
                    if job.device != device:
                        room[device] -= job.held
                    job.done, job.device, job.ready = job.done + count, device, now
                    if job.is_done:
                        room[device] += job.held

    def _may(self, job: SampleJob, device: int, draft: Draft) -> bool:
        if job.is_done or device not in draft.homes[job.component]:
            return False
        return draft.moving or job.device in (-1, device)

    def _ready(self, job: SampleJob, device: int) -> float:
        """Time at which the job can continue on ``device``."""
        problem = self.problem
        if job.done:
            away = job.device != device
            lag = problem.lag_s(job.component, job.done - 1, job.num_samples) if away else 0.0
            return job.ready + lag
        ready = 0.0
        for other in job.deps:
            if not other.is_done:
                return math.inf
            lag = problem.result_lag_s(other.component, other.num_samples)
            ready = max(ready, other.ready + (lag if other.device != device else 0.0))
        return ready

    def _options(
        self, jobs: list[SampleJob], device: int, room: list[float], draft: Draft | None
    ) -> list[SampleJob]:
        """Jobs for the knapsack, limited in number, few of them identical.

        With ``draft`` the order is: jobs on this device, new jobs, jobs on other devices. Ties go
        to jobs with fewer possible devices.
        """
        alike: dict[tuple[int, int, int], int] = defaultdict(int)
        found = []
        spare = room[device]
        if draft:
            homes = draft.homes
            jobs = sorted(
                jobs,
                key=lambda job: (job.device != device, job.device != -1, len(homes[job.component])),
            )
        for job in jobs:
            kind = job.component, job.done, job.num_samples
            if alike[kind] == ALIKE:
                continue
            if job.device != device:
                if job.held > spare:
                    continue
                spare -= job.held
            alike[kind] += 1
            found.append(job)
            if len(found) == MOST:
                break
        return found


def _put(line: list[Slice], job: SampleJob, count: int) -> None:
    """Append a slice, or extend the last one if it belongs to the same job."""
    layers = job.done, job.done + count
    if line and line[-1][0] == job.component and line[-1].samples == job.samples:
        line[-1] = line[-1]._replace(layers=(line[-1].layers[0], layers[1]))
    else:
        line.append(Slice(job.component, layers, job.samples))
