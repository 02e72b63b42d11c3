"""Random small schedules for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_pulse.planner.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.schedule.registry import make_schedule


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Sequential, interleaved and folded placements on 2 to 5 devices."""
    num_devices = draw(st.integers(2, 5))
    return draw(
        st.sampled_from(
            [
                sequential(num_devices),
                interleaved(num_devices, 2),
                interleaved(num_devices, 3),
                fold(num_devices, 1),
                fold(num_devices, 2),
            ]
        )
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every named schedule on every placement that it can run on; waves also under caps."""
    placement = draw(placements())
    num_microbatches = draw(st.integers(1, 9))
    name = draw(st.sampled_from(["auto", "gpipe", "wave", "wave"]))
    if name != "wave":
        return make_schedule(name, placement, num_microbatches, effort=2)
    num = placement.num_stages
    durations = st.lists(st.floats(0.1, 5.0), min_size=num, max_size=num)
    return make_schedule(
        name,
        placement,
        num_microbatches,
        cap=draw(st.none() | st.integers(placement.num_chunks, num + 2)),
        forward=draw(st.none() | durations),
        backward=draw(st.none() | durations),
        link=draw(st.sampled_from([0.0, 0.5, 3.0])),
        effort=draw(st.integers(1, 2)),
    )


def with_order(schedule: Schedule, device: int, order: list[Operation]) -> Schedule:
    """The schedule with another order on one device."""
    changed = tuple(tuple(order) if d == device else old for d, old in enumerate(schedule.order))
    return Schedule("mutated", schedule.placement, schedule.num_microbatches, changed)
