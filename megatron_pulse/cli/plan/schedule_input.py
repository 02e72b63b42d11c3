"""Input of ``pulse schedule``: stages and their times, from a profile or a file of times."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.cli.flag_checks import as_user_error, require, warn
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json
from megatron_pulse.planner.layout.layouts import default_layout, layout_of
from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement

if TYPE_CHECKING:
    from megatron_pulse.planner.cluster.cluster import Link
    from megatron_pulse.planner.schedule.problem import ScheduleProblem
    from megatron_pulse.profile.profile import Profile

MEMORY_KEYS = ("recompute_s", "recompute_bytes", "wgrad_bytes", "offload_bytes", "offload_s")
"""Keys of a file of times for activations not kept whole, named as in ``ScheduleProblem``."""

KEYS = ("forward", "backward", "input_grad", "weight_grad", "activation", "link", *MEMORY_KEYS)
"""Keys of a file of times."""


@dataclass(frozen=True)
class ScheduleInput:
    """Scheduling problem with whole and split backwards (None: unknown), and its unit.

    A time is printed in ``unit`` after multiplication by ``scale``. ``samples`` is the size of a
    microbatch (None: unknown). ``profile`` is the source of the times (None: a file of times).
    """

    name: str
    whole: ScheduleProblem
    split: ScheduleProblem | None
    unit: str
    scale: float
    samples: int | None
    profile: Profile | None = None


def from_times(args: argparse.Namespace) -> ScheduleInput:
    """Stages of ``--times``; raises UserError with every fault of the file."""
    from megatron_pulse.planner.schedule.problem import ScheduleProblem

    record = read_json(args.times, FileKind.TIMES)
    faults = _times_faults(record)
    require([f"{args.times}: {fault}" for fault in faults])
    column = {name: tuple(map(float, v)) for name, v in record.items() if isinstance(v, list)}
    num = len(column["forward"])
    placement = _placement(args, num)
    link: float | tuple[float, ...] = (
        column["link"] if "link" in column else float(record.get("link", 0.0))
    )
    activation = column.get("activation")
    kept = {name: column[name] for name in MEMORY_KEYS if name in column}
    waiting = kept.pop("wgrad_bytes", None)
    with as_user_error(ValueError):
        both = zip(column.get("input_grad", ()), column.get("weight_grad", ()), strict=True)
        backward = column.get("backward") or tuple(i + w for i, w in both)
        whole = ScheduleProblem(
            placement,
            args.microbatches,
            column["forward"],
            backward,
            link=link,
            activation=activation,
            cap=cap(args, placement, activation or (1.0,) * num),
            **kept,
        )
        split = None
        if "input_grad" in column:
            given = column["input_grad"], column["weight_grad"]
            split = replace(whole, backward=given[0], weight_grad=given[1], wgrad_bytes=waiting)
    return ScheduleInput(args.times.stem, whole, split, "", 1.0, None)


def profile_link(args: argparse.Namespace) -> Link:
    """Link between two devices of a profile, from the flags or their defaults."""
    from megatron_pulse.planner.cluster.cluster import Link

    return Link(
        (5.0 if args.link_us is None else args.link_us) * 1e-6,
        (12.5 if args.link_gbs is None else args.link_gbs) * 1e9,
    )


def from_profile(args: argparse.Namespace) -> ScheduleInput:
    """Stages of the best partition of ``--profile``, as 'pulse partition' finds it."""
    from megatron_pulse.planner.partition.find import Goal, best
    from megatron_pulse.planner.schedule.problem import boundary_s, stage_problem
    from megatron_pulse.profile.files import load_profile
    from megatron_pulse.profile.warnings import spread_caution

    profile = load_profile(args.profile)
    warn(spread_caution(profile))
    size = args.micro_batch_size or profile.micro_batch_sizes[0]
    costs = profile.at(size)
    layout = layout_of(args.placement or default_layout(bool(costs.skips)).kind.name)
    layout = layout.with_chunks(2 * (args.waves or 1))
    link = profile_link(args)
    found = best(layout, costs, args.num_devices, Goal(link=link))
    partition = found.partition
    took = (partition.per_stage(costs.forward_s), partition.per_stage(costs.backward_s))
    if min(map(min, took)) <= 0:
        require([f"{args.profile}: a stage takes no time, so there is nothing to schedule"])
    sent = boundary_s(costs, partition, link)
    make = partial(stage_problem, costs, partition, args.microbatches, sent)
    limit = cap(args, partition.placement, (1.0,) * partition.placement.num_stages)
    with as_user_error(ValueError):
        whole = make(cap=limit)
    # A stage without parameters has a weight gradient too, of almost no time.
    split = make(cap=limit, split=True, least_s=1e-6 * max(whole.backward))
    return ScheduleInput(name_of(profile.backbone), whole, split, "ms", 1e3, size, profile)


def cap(
    args: argparse.Namespace, placement: Placement, activation: tuple[float, ...]
) -> tuple[float, ...] | None:
    """``--cap`` for each device; by default the sum of all stages' activations of a microbatch."""
    if args.cap == math.inf:
        return None
    limit = sum(activation) if args.cap is None else args.cap
    return (limit,) * placement.num_devices


def _placement(args: argparse.Namespace, num_stages: int) -> Placement:
    """Placement of ``num_stages`` stages; raises UserError if there is none."""

    devices = args.num_devices
    default = "sequential" if num_stages == devices and not args.waves else "fold"
    kind = PLACEMENTS[args.placement or default]
    chunks, rest = divmod(num_stages, devices)
    asked = kind.least_chunks * (args.waves or 1)
    if rest or not kind.allows(chunks) or (args.waves and kind.chunk_step and chunks != asked):
        several = kind.chunk_step and not args.waves
        more = f", or {kind.chunk_step * devices} more, ..." if several else ""
        require(
            [
                f"{args.times} has {num_stages} stages; {kind} on {devices} device(s) takes "
                f"{asked * devices}{more}"
            ]
        )
    return kind.place(devices, chunks)


def _times_faults(record: dict[str, Any]) -> list[str]:
    faults = [
        f"{name!r} is unknown; there are: {', '.join(KEYS)}"
        for name in sorted(record.keys() - KEYS)
    ]
    if "forward" not in record:
        faults.append("'forward' is missing: the time of each stage's forward")
    if "backward" not in record and not {"input_grad", "weight_grad"} <= record.keys():
        faults.append("give 'backward', or 'input_grad' and 'weight_grad'")
    elif ("input_grad" in record) != ("weight_grad" in record):
        faults.append("'input_grad' and 'weight_grad' come together")
    if "wgrad_bytes" in record and "weight_grad" not in record:
        faults.append("'wgrad_bytes' needs a split backward: give 'weight_grad'")
    lists = {name: record[name] for name in KEYS if name in record}
    if isinstance(lists.get("link"), int | float) and not isinstance(lists["link"], bool):
        lists["link"] = [lists["link"]]
    for name, values in lists.items():
        least = 0.0 if name in ("activation", "link", *MEMORY_KEYS) else 1e-12
        if not isinstance(values, list) or not values:
            faults.append(f"{name!r} must be a list of numbers, one for each stage")
        elif bad := [v for v in values if not _is_number(v) or v < least]:
            above = "0 or more" if least == 0 else "above 0"
            faults.append(f"{name!r} has {json.dumps(bad[0])[:60]}; values must be numbers {above}")
    num = len(record["forward"]) if isinstance(record.get("forward"), list) else None
    for name, values in record.items():
        if num and name in KEYS and isinstance(values, list):
            wanted = num - 1 if name == "link" else num
            if len(values) != wanted:
                faults.append(f"{name!r} has {len(values)} values; {num} stages need {wanted}")
    return faults


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
