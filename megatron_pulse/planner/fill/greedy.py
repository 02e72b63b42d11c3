"""The filling of DiffusionPipe (arXiv 2405.01248, section 5), as the baseline.

An idle interval is a span of time in which the same devices are idle; layers are divided over them
by samples. Intervals are gone through in time order. Each takes, of the components that are ready,
the longest prefix of whole layers that fits, then of one next layer as many samples as fit. What is
left runs on all devices after the flush. Every device hosts every component, memory and links are
not looked at.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from megatron_pulse.planner.fill.components import Component, Piece
from megatron_pulse.planner.fill.problem import Filled, FillProblem, merged


@dataclass
class _Progress:
    """Layers that are done, and how many samples of the next."""

    component: Component
    number: int
    num_samples: int
    layer: int = 0
    samples: int = 0

    @property
    def is_done(self) -> bool:
        return self.layer == len(self.component.layers)

    def seconds(self, devices: int) -> float:
        """What is left of the layer, divided over so many devices."""
        share = math.ceil((self.num_samples - self.samples) / devices)
        return self.component.layers[self.layer].time_s(share)

    def fitting(self, devices: int, seconds: float) -> int:
        """How many samples of the layer fit, a whole number on each device."""
        layer, most = self.component.layers[self.layer], 0
        left = self.num_samples - self.samples
        for each in range(1, math.ceil(left / devices) + 1):
            if layer.time_s(each) <= seconds:
                most = each
        return min(left, most * devices)

    def run(self, devices: list[int], samples: int) -> list[tuple[int, Piece]]:
        """So many of the layer's samples, divided over devices."""
        each, found = math.ceil(samples / len(devices)), []
        end = self.samples + samples
        for device, first in zip(devices, range(self.samples, end, each), strict=False):
            block = first, min(first + each, end)
            found.append((device, Piece(self.number, (self.layer, self.layer + 1), block)))
        self.samples = end
        if self.samples == self.num_samples:
            self.layer, self.samples = self.layer + 1, 0
        return found


def greedy(problem: FillProblem) -> Filled:
    """The filled step of the paper's algorithm."""
    pieces: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    progress = [
        _Progress(component, number, problem.num_samples)
        for number, component in enumerate(problem.components)
    ]
    makespan = problem.timeline.makespan
    for start, end, devices, positions in _bubbles(problem, makespan):
        left = end - start
        for one in _ready(problem, progress):
            while not one.is_done and one.seconds(len(devices)) <= left:
                left -= one.seconds(len(devices))
                for device, piece in one.run(devices, one.num_samples - one.samples):
                    pieces[device, positions[device]].append(piece)
        for one in _ready(problem, progress):
            if count := one.fitting(len(devices), left):
                for device, piece in one.run(devices, count):
                    pieces[device, positions[device]].append(piece)
                break
    every = list(range(problem.num_devices))
    while waiting := _ready(problem, progress):
        for one in waiting:
            while not one.is_done:
                for device, piece in one.run(every, one.num_samples - one.samples):
                    position = len(problem.schedule.order[device])
                    pieces[device, position].append(piece)
    return merged(problem, pieces)


def _ready(problem: FillProblem, progress: list[_Progress]) -> list[_Progress]:
    """What has something to do, and waits for no other component."""
    return [
        one
        for one in progress
        if not one.is_done and all(progress[b].is_done for b in problem.before[one.number])
    ]


def _bubbles(
    problem: FillProblem, makespan: float
) -> list[tuple[float, float, list[int], dict[int, int]]]:
    """Spans in which the same devices are idle: start, end, devices, and per device the position
    in its order."""
    gaps = [gap for mine in problem.gaps for gap in mine]
    edges = sorted({min(t, makespan) for gap in gaps for t in (gap.start, gap.end)})
    found = []
    for start, end in itertools.pairwise(edges):
        idle = {
            gap.device: gap.position
            for gap in gaps
            if gap.start <= start and min(gap.end, makespan) >= end
        }
        if idle:
            found.append((start, end, sorted(idle), idle))
    return found
