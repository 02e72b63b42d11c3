"""Classic schedules by name: their order does not depend on durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.hanayo import hanayo
from megatron_pulse.planner.schedule.classic.one_f_one_b import gpipe, interleaved_1f1b, one_f_one_b
from megatron_pulse.planner.schedule.classic.zero_bubble import dualpipe_v, zb_h1, zb_v
from megatron_pulse.planner.schedule.operations import Schedule

CLASSICS: Mapping[str, Callable[[Placement, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "hanayo": hanayo,
}
"""Functions from a placement and a number of microbatches to the schedule.

Each raises ValueError for a placement that it does not support.
"""

SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules with split backwards."""
