"""``pulse partition``: cuts of a backbone into stages, and their costs."""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.cli.flag_checks import add_flag, add_parser, command_faults, require, warn
from megatron_pulse.cli.output import add_json, print_result, write
from megatron_pulse.cli.shared_flags import add_micro_batch_size, add_num_devices, add_profile
from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ZERO, TO_MILLION, flag_name
from megatron_pulse.errors import unknown_name
from megatron_pulse.planner.layout.layouts import default_layout, modes
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.profile.roofline import ELEMENT_BYTES, PRESETS, Roofline
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.planner.partition.evaluate import MemoryRule
    from megatron_pulse.planner.partition.find import MemoryRules
    from megatron_pulse.profile.profile import Profile

_DESCRIPTION = """\
Cuts the chain of layers into stages so that the load of the busiest device is least. The load is
forward, backward and messages (--objective load), or the largest stage, as in the PULSE paper
(--objective stage). Modes:

{modes}

Memory counts the in-flight activations and Megatron's state of a parameter: bfloat16 18 bytes
(parameter 2, fp32 gradient 4, main parameter 4, Adam 8), float16 20, float32 16.
--distributed-optimizer divides main parameter and Adam among replicas. Workspace of kernels and the
CUDA context are not counted: leave a tenth by --memory-gb.

examples:
  pulse partition --profile profile.json -p 4
  pulse partition --profile profile.json -p 8 --mode soft --compare --draw soft.svg
  pulse partition --from-table sd21_512_fine.json --preset V100-32GB -p 4 --json -
  pulse partition --profile profile.json -p 8 --data-parallel 4 --distributed-optimizer
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``partition``."""

    lines = (f"  {mode:13s} {layout.help}" for mode, layout in modes().items())
    description = _DESCRIPTION.format(modes="\n".join(lines))
    parser = add_parser(commands, "partition", "cut a backbone into stages", description, run)
    add = partial(add_flag, parser)
    what = parser.add_mutually_exclusive_group(required=True)
    add_profile(what)
    add_flag(what, "--from-table FILE", "a table of layers, as JSON", reads=True)
    add("--preset NAME", f"the table's device: {', '.join(PRESETS)}")
    add_num_devices(parser)
    add("--mode", "default: soft with skips, else sequential", choices=modes())
    add(
        "--num-chunks V",
        "stages on each device of a fold or interleaved (default 2; a fold of W waves: 2 W)",
        type=int,
    )
    add_micro_batch_size(parser, "; 1 for a table")
    add("--objective", "default: load", choices=("load", "stage"), default="load")
    add(
        "--lambda L",
        "weight of messages in --objective stage (default 1)",
        dest="lam",
        within=FROM_ZERO,
        default=1.0,
    )
    add(
        "--slack X",
        "share by which an objective may exceed its best if a later one gains: with 0.05, the "
        "smallest stage, then the fewest bytes, among loads within 5 %% (default 0)",
        within=FROM_ZERO,
        default=0.0,
    )
    add(
        "--bandwidth-gbs X",
        "of the link between two devices, each way, in GB/s (default 12.5, 100 Gbit/s)",
        within=ABOVE_ZERO,
        default=12.5,
    )
    add("--latency-us X", "of a message in microseconds (default 5)", within=FROM_ZERO, default=5.0)
    limit = parser.add_mutually_exclusive_group()
    add_flag(
        limit,
        "--memory-gb G",
        "memory of a device (default: the profile's)",
        within=ABOVE_ZERO,
        type=float,
    )
    add_flag(limit, "--no-memory", "no memory limit")
    add(
        "--microbatches M",
        "microbatches of a step, for in-flight activations (default 2 P, where they peak)",
        within=TO_MILLION,
        type=int,
    )
    add(
        "--bytes-per-parameter X",
        "with gradient and optimizer (default: as above)",
        within=ABOVE_ZERO,
        type=float,
    )
    add("--data-parallel D", "replicas (default 1)", within=TO_MILLION, default=1)
    add("--distributed-optimizer", "as Megatron's flag of this name")
    add("--recompute", "recompute activations, whatever the profile says")
    add("--compare", "compare layouts")
    add_json(parser)
    add("--draw SVG", "draw the partition", writes=[".svg"])


def run(args: argparse.Namespace) -> None:
    """Search, then print, write and draw."""
    require(_faults(args))
    from megatron_pulse.cli.plan.partition_report import PartitionReport, as_json, report
    from megatron_pulse.planner.cluster.cluster import Link
    from megatron_pulse.planner.draw.partition import draw_partition
    from megatron_pulse.planner.partition.find import Goal, best, best_of_each
    from megatron_pulse.profile.warnings import spread_caution

    profile = _load(args)
    warn(spread_caution(profile))
    size = args.micro_batch_size or profile.micro_batch_sizes[0]
    costs = profile.at(
        size, profile.all_layers(ActivationPolicy.RECOMPUTE) if args.recompute else None
    )
    limit_bytes = _limit(args, profile)
    rules = _memory_rules(args, profile.dtype, limit_bytes)
    order = ("load", "stage", "bytes") if args.objective == "load" else ("stage", "load", "bytes")
    link = Link(args.latency_us * 1e-6, args.bandwidth_gbs * 1e9)
    goal = Goal(order, link=link, lam=args.lam, memory=rules, slack=args.slack)
    known = default_layout(bool(costs.skips), len(costs.starts))  # several starts: a cascade
    layout = modes()[args.mode] if args.mode else known
    if args.num_chunks is not None and not layout.kind.chunk_step:
        require(["--num-chunks: without skips the mode is sequential; give --mode interleaved"])
    chunks = args.num_chunks or 2
    if len(costs.starts) > 1:
        chunks = known.num_chunks
        require(
            [
                f"{flag_name(name)}: a cascade has the layout {known.name} alone"
                for name in ("mode", "num_chunks", "compare")
                if getattr(args, name)
            ]
        )
    layout = layout.with_chunks(chunks)
    placement = layout.placement(args.num_devices)
    if placement.num_stages <= len(costs.names):
        rules(placement)  # makes the schedule, which is not part of the search
    begin = time.perf_counter()
    with ProgressLine("searching cuts"):
        found = best(layout, costs, args.num_devices, goal)
        seconds = time.perf_counter() - begin
        others = best_of_each(costs, args.num_devices, goal, chunks) if args.compare else {}
    result = PartitionReport(
        profile,
        size,
        args.recompute or profile.recompute,
        costs,
        args.objective,
        limit_bytes,
        found,
        seconds,
        others,
    )
    lines = report(result)
    if args.draw is not None:
        picture = draw_partition(costs, found.partition, found.evaluation, *result.headings())
        write(args.draw, picture)
        lines.append(f"drawn to {args.draw}")
    print_result(args, lines, partial(as_json, result))


def _load(args: argparse.Namespace) -> Profile:
    if args.profile is not None:
        from megatron_pulse.profile.files import load_profile

        return load_profile(args.profile)
    from megatron_pulse.profile.profile_from_table import read_table

    device = PRESETS[args.preset]
    roofline = Roofline(device, device.half_dtype)
    return read_table(args.from_table, roofline, (args.micro_batch_size or 1,))


def _limit(args: argparse.Namespace, profile: Profile) -> float | None:
    if args.no_memory:
        return None
    if args.memory_gb is not None:
        return float(args.memory_gb * 1e9)
    return float(profile.memory_bytes) or None


def _memory_rules(args: argparse.Namespace, dtype: str, limit_bytes: float | None) -> MemoryRules:
    """Memory rules of the devices."""
    from megatron_pulse.planner.partition.evaluate import MemoryRule
    from megatron_pulse.planner.partition.memory import bytes_per_parameter, in_flight

    per_parameter = args.bytes_per_parameter or bytes_per_parameter(
        dtype, args.distributed_optimizer, args.data_parallel
    )
    num_microbatches = args.microbatches or 2 * args.num_devices

    def rule(placement: Placement) -> MemoryRule:
        return MemoryRule(
            math.inf if limit_bytes is None else limit_bytes,
            per_parameter,
            in_flight(placement, num_microbatches),
            ELEMENT_BYTES[dtype] / per_parameter,
        )

    return rule


def _faults(args: argparse.Namespace) -> list[str]:

    faults = command_faults(args)
    if args.from_table is None and args.preset is not None:
        faults.append("--preset is for --from-table; a profile knows its device")
    if args.from_table is not None and args.preset not in PRESETS:
        known = ", ".join(PRESETS)
        missing = f"--from-table: give the device as --preset: {known}"
        faults.append(unknown_name("preset", args.preset, PRESETS) if args.preset else missing)
    if args.num_chunks is not None:
        kind = (modes()[args.mode] if args.mode else default_layout(has_skips=True)).kind
        if not kind.allows(args.num_chunks):
            faults.append(
                f"--num-chunks is {args.num_chunks}; a device of {kind} hosts {kind.chunks}"
                " stage(s)"
            )
    if args.bytes_per_parameter is not None and args.distributed_optimizer:
        faults.append("give either --bytes-per-parameter or --distributed-optimizer")
    return faults
