"""Greedy bubble filling of DiffusionPipe (arXiv 2405.01248, section 5), as the baseline.

A bubble is a time span in which the same devices are idle. Layers are divided over these devices by
samples. Bubbles are visited in time order. Each takes the longest prefix of whole layers that fits,
component by component among the ready ones. Then it takes as many samples of one next layer as fit.
The rest runs on all devices after the flush. Every device hosts every component; memory and links
are ignored.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from megatron_pulse.planner.bubble_fill.components import Component, Slice
from megatron_pulse.planner.bubble_fill.problem import FilledOrder, FillProblem, merged


@dataclass
class _Progress:
    """Completed layers of a component, and completed samples of the next layer."""

    component: Component
    number: int
    num_samples: int
    layer: int = 0
    samples: int = 0

    @property
    def is_done(self) -> bool:
        return self.layer == len(self.component.layers)

    def seconds(self, devices: int) -> float:
        """Seconds for the rest of the layer, divided over ``devices``."""
        share = math.ceil((self.num_samples - self.samples) / devices)
        return self.component.layers[self.layer].time_s(share)

    def fitting(self, devices: int, seconds: float) -> int:
        """Samples of the layer that fit, with equal whole numbers per device."""
        layer, most = self.component.layers[self.layer], 0
        left = self.num_samples - self.samples
        for each in range(1, math.ceil(left / devices) + 1):
            if layer.time_s(each) <= seconds:
                most = each
        return min(left, most * devices)

    def run(self, devices: list[int], samples: int) -> list[tuple[int, Slice]]:
        """Slices of ``samples`` of the layer, divided over devices."""
        each, found = math.ceil(samples / len(devices)), []
        end = self.samples + samples
        for device, first in zip(devices, range(self.samples, end, each), strict=False):
            block = first, min(first + each, end)
            found.append((device, Slice(self.number, (self.layer, self.layer + 1), block)))
        self.samples = end
        if self.samples == self.num_samples:
            self.layer, self.samples = self.layer + 1, 0
        return found


def greedy(problem: FillProblem) -> FilledOrder:
    """Filled step of the paper's algorithm."""
    slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
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
                for device, slice_ in one.run(devices, one.num_samples - one.samples):
                    slices[device, positions[device]].append(slice_)
        for one in _ready(problem, progress):
            if count := one.fitting(len(devices), left):
                for device, slice_ in one.run(devices, count):
                    slices[device, positions[device]].append(slice_)
                break
    every = list(range(problem.num_devices))
    while waiting := _ready(problem, progress):
        for one in waiting:
            while not one.is_done:
                for device, slice_ in one.run(every, one.num_samples - one.samples):
                    position = len(problem.schedule.order[device])
                    slices[device, position].append(slice_)
    return merged(problem, slices)


def _ready(problem: FillProblem, progress: list[_Progress]) -> list[_Progress]:
    return [
        one
        for one in progress
        if not one.is_done and all(progress[b].is_done for b in problem.before[one.number])
    ]


def _bubbles(
    problem: FillProblem, makespan: float
) -> list[tuple[float, float, list[int], dict[int, int]]]:
    """Spans in which the same devices are idle: start, end, devices, and position in each device's
    order."""
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
