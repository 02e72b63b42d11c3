"""Random small filling problems."""

from __future__ import annotations

import random

from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import fold, sequential
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule


def draw_case(rng: random.Random) -> FillProblem:
    """Two or three devices, one or two components of whole seconds, some with little memory.

    Samples run one at a time, so that the exact model knows all slices there can be.
    """
    devices = rng.choice((2, 2, 3))
    folded = rng.random() < 0.5
    placement = fold(devices) if folded else sequential(devices)
    stages = placement.num_stages
    microbatches = rng.randint(2, 3)
    forward = tuple(float(rng.randint(2, 5)) for _ in range(stages))
    backward = tuple(float(rng.randint(3, 8)) for _ in range(stages))
    step = ScheduleProblem(
        placement, microbatches, forward, backward, None, float(rng.randint(0, 1))
    )
    name = "gpipe" if folded else rng.choice(("1f1b", "gpipe"))
    schedule = make_schedule(name, placement, microbatches)
    bounded = rng.random() < 0.5
    moved = rng.random() < 0.5
    components = []
    for number in range(rng.randint(1, 2)):
        layers = tuple(
            FrozenLayer(
                f"{i}",
                {1: float(rng.randint(1, 6))},
                float(rng.randint(1, 4)),
                float(rng.randint(1, 3)),
                float(rng.randint(1, 2)),
            )
            for i in range(rng.randint(1, 4))
        )
        after = ("c0",) if number and rng.random() < 0.3 else ()
        home = None if rng.random() < 0.7 else (rng.randrange(devices),)
        consumers = tuple(sorted(rng.sample(range(devices), rng.randint(1, devices))))
        components.append(Component(f"c{number}", layers, after, 1.0, consumers, home, (1,)))
    samples = rng.randint(2, 4)
    free = None
    if bounded:
        # What all parameters, results and one open sample of each component take, or somewhat more.
        whole = sum(
            c.parameter_bytes
            + 2 * samples * c.result_bytes
            + max(layer.activation_bytes + layer.output_bytes for layer in c.layers)
            for c in components
        )
        free = tuple(whole + rng.randint(0, 6) for _ in range(devices))
    # A byte takes a second where there is a link to speak of.
    return FillProblem(
        step, schedule, tuple(components), samples, free, Link(0.0, 1.0) if moved else Link()
    )
