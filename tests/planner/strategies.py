"""Random small schedules for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import (
    Placement,
    fold,
    interleaved,
    opposite,
    sequential,
)
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule, pick
from tests.planner.schedules import wave


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Sequential, interleaved and folded placements, and a cascade's, on 2 to 5 devices."""
    num_devices = draw(st.integers(2, 5))
    return draw(
        st.sampled_from(
            [
                sequential(num_devices),
                interleaved(num_devices, 2),
                interleaved(num_devices, 3),
                fold(num_devices, 1),
                fold(num_devices, 2),
                opposite(num_devices),
            ]
        )
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every named schedule on every placement that it can run on; waves also under caps."""
    placement = draw(placements())
    num_microbatches = draw(st.integers(1, 9))
    name = draw(st.sampled_from(["auto", "gpipe", "wave", "wave"]))
    if pick(name, placement) != "wave":
        return make_schedule(name, placement, num_microbatches)
    num = placement.num_stages
    durations = st.lists(st.floats(0.1, 5.0), min_size=num, max_size=num)
    return wave(
        placement,
        num_microbatches,
        draw(st.none() | st.integers(placement.num_chunks, num + 2)),
        forward=draw(st.none() | durations),
        backward=draw(st.none() | durations),
        link=draw(st.sampled_from([0.0, 0.5, 3.0])),
        effort=draw(st.integers(1, 2)),
    )


def with_order(schedule: Schedule, device: int, order: list[Operation]) -> Schedule:
    """The schedule with another order on one device."""
    changed = tuple(tuple(order) if d == device else old for d, old in enumerate(schedule.order))
    return Schedule("mutated", schedule.placement, schedule.num_microbatches, changed)


def equal(
    placement: Placement,
    num_microbatches: int,
    cap: float | None = None,
    split: bool = False,
    link: float = 0.0,
    backward: float = 2.0,
) -> ScheduleProblem:
    """Equal stages: forward 1, ``backward`` whole or in two halves; ``cap`` on every device."""
    num = placement.num_stages
    return ScheduleProblem(
        placement,
        num_microbatches,
        (1.0,) * num,
        (backward / 2 if split else backward,) * num,
        (backward / 2,) * num if split else None,
        link,
        cap=None if cap is None else (float(cap),) * placement.num_devices,
    )


@st.composite
def problems(draw: st.DrawFn) -> ScheduleProblem:
    """Random times, links, memory and caps, whole or split."""
    placement = draw(placements())
    num = placement.num_stages

    def numbers(least: float, most: float) -> tuple[float, ...]:
        return tuple(
            draw(
                st.lists(st.floats(least, most, allow_subnormal=False), min_size=num, max_size=num)
            )
        )

    activation = draw(st.none() | st.just(numbers(0.0, 3.0)))
    weight_grad = draw(st.none() | st.just(numbers(0.1, 5.0)))
    waiting = draw(st.none() | st.just(numbers(0.0, 3.0))) if weight_grad else None
    taken = activation or (1.0,) * num
    most = tuple(map(max, taken, waiting or taken))
    cap = tuple(
        sum(most[s] for s in placement.stages_of_device(d)) * draw(st.floats(1.0, 3.0))
        for d in range(placement.num_devices)
    )
    return ScheduleProblem(
        placement,
        draw(st.integers(1, 6)),
        numbers(0.1, 5.0),
        numbers(0.1, 5.0),
        weight_grad,
        draw(st.sampled_from([0.0, 0.5, 3.0])),
        activation,
        draw(st.none() | st.just(cap)),
        wgrad_bytes=waiting,
    )
