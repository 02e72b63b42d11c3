"""``pulse schedule``: order of the operations of a pipeline's devices, and its quality."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.output import DRAWINGS, add_json, print_result, write
from megatron_pulse.cli.shared_flags import (
    add_encoder_costs,
    add_micro_batch_size,
    add_num_devices,
    add_profile,
    add_solver,
)
from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ZERO, TO_4096
from megatron_pulse.errors import UserError
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_text
from megatron_pulse.planner.layout.placement import PLACEMENTS
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.operations import OpType, Schedule
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.cli.plan.schedule_input import ScheduleInput
    from megatron_pulse.planner.bubble_fill.filled_schedule import FilledSchedule
    from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis

_DESCRIPTION = """\
Finds a short schedule of the forwards and backwards of M microbatches, for given stage and link
times and a memory cap. The makespan is simulated. No schedule is shorter than the lower bound.
'optimal' means that both are equal, or that a solver proved it.

The stages are those of 'pulse partition' for a profile, or come with a file of times:

  {"forward": [1, 1, 1, 1], "input_grad": [1, 1, 1, 1], "weight_grad": [1, 1, 1, 1],
   "link": [0.1, 0, 0.1], "activation": [1, 1, 1, 1]}

with one value per stage, in any unit. "backward" replaces the two gradients without --split. "link"
(one for all, or one per boundary) and "activation" are optional. A fold of W waves has 2 P W
stages. Further optional lists:

  recompute_s       time of the recomputation R, which may run ahead of the backward
  recompute_bytes   memory held from R on
  wgrad_bytes       memory held from input gradient to weight gradient
  offload_bytes     share of an activation that may be offloaded
  offload_s         time of its copy, each way

Memory counts live stage activations: from the forward to the backward (with --split: to the weight
gradient). The default cap is that of 1F1B, one of every stage.

--compare runs classic schedules on the same chain: GPipe, 1F1B and ZB-H1 with neighbouring stages
merged, interleaved, ZB-V, DualPipe-V and Hanayo on the fold, and Chimera with two copies of the
model.

Results are cached in $PULSE_CACHE_DIR (default: megatron_pulse in $XDG_CACHE_HOME or ~/.cache) for
equal ratios of times, to 1 %. A cached schedule is used if it is optimal or its search had as much
time. It is checked and timed anew.

examples:
  pulse schedule --profile profile.json -p 4 -m 16 --compare
  pulse schedule --profile profile.json -p 4 -m 16 --split --cap 6 --draw timeline.svg
  pulse schedule --times times.json -p 8 -m 32 --solver highs --seconds 60 --csv best.csv
  pulse schedule --times times.json -p 8 -m 32 --schedule mine.csv --draw mine.html
  pulse schedule --times times.json -p 8 -m 32 --name zb-v --draw trace.json   (ui.perfetto.dev)
"""

_SECONDS = 10.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``schedule``."""

    parser = add_parser(
        commands,
        "schedule",
        "schedule the operations of a pipeline's devices",
        _DESCRIPTION,
        simulate,
    )
    add = partial(add_flag, parser)
    what = parser.add_mutually_exclusive_group(required=True)
    add_profile(what)
    add_flag(what, "--times JSON", "stage times, see above", reads=True)
    add_num_devices(parser)
    add("-m, --microbatches M", "in a step", within=TO_4096, type=int, required=True)
    add(
        "--placement",
        "default: sequential for a profile without skips or times of one stage per device; "
        "else fold",
        choices=PLACEMENTS,
    )
    add(
        "--waves W",
        "of a fold; interleaved has 2 W stages on each "
        "device (default: 1, or what the file's stages make)",
        within=TO_4096,
        type=int,
    )
    add_micro_batch_size(parser)
    add("--split", "split backwards into input and weight gradients")
    add(
        "--cap A",
        "most live stage activations of a device, or 'none' (default: as 1F1B)",
        type=_cap,
    )
    add(
        "--link-gbs X",
        "of a profile: between two devices, each way, in GB/s (default 12.5)",
        within=ABOVE_ZERO,
        type=float,
    )
    add(
        "--link-us X",
        "of a profile: a message's latency in microseconds (default 5)",
        within=FROM_ZERO,
        type=float,
    )
    add_solver(
        parser,
        "exact solver after the constructive search (default auto: the one that is installed and "
        "fits)",
    )
    add("--seconds S", f"seconds of search (default {_SECONDS:g})", within=FROM_ZERO, type=float)
    own = parser.add_mutually_exclusive_group()
    add_flag(
        own,
        "--name",
        "a classic schedule (default auto: synthesize one)",
        choices=("auto", *CLASSICS),
        default="auto",
    )
    add_flag(
        own,
        "--schedule CSV",
        "a schedule of your own: a row per device, cells as 2F0 (stage 2, forward, microbatch "
        "0; B, or I and W; R recompute, O offload, L load)",
        reads=True,
    )
    add("--compare", "compare with classic schedules")
    add(
        "--draw FILE",
        ".svg: a picture; .html: a report; .json: a trace for ui.perfetto.dev",
        writes=DRAWINGS,
    )
    add("--csv CSV", "write the order for --schedule and --pulse-schedule", writes=[".csv"])
    add_encoder_costs(parser, "with a profile: ")
    add_json(parser)
    add("--no-cache", "neither read nor write the cache")


def simulate(args: argparse.Namespace) -> None:
    """Solve or evaluate, then print, write and draw."""
    require(_faults(args))
    args.seconds = _SECONDS if args.seconds is None else args.seconds
    from megatron_pulse.cli.plan.schedule_input import from_profile, from_times
    from megatron_pulse.cli.plan.schedule_report import (
        ScheduleReport,
        as_json,
        report,
        write_drawing,
    )
    from megatron_pulse.planner.schedule.classic.compare import rivals
    from megatron_pulse.planner.schedule.serialize import to_csv

    task = from_times(args) if args.times is not None else from_profile(args)
    if args.split and task.split is None:
        require(["--split: the times of input and weight gradients are not known for every stage"])
    problem, found = _answer(args, task)
    filled = None
    if args.encoders is not None:
        filled = _filled(args, task, problem, found)
        found = filled.synthesis
    others = rivals(task.whole, task.split) if args.compare else []
    result = ScheduleReport(task, problem, found, others, filled)
    lines = report(result)
    if args.csv is not None:
        write(args.csv, to_csv(found.schedule))
        lines.append(f"order written to {args.csv}")
    if args.draw is not None:
        lines.append(write_drawing(result, args.draw))
    print_result(args, lines, partial(as_json, result))


def _filled(
    args: argparse.Namespace, task: ScheduleInput, problem: ScheduleProblem, found: Synthesis
) -> FilledSchedule:
    """Schedule with the components of ``--encoders`` as bubble tasks."""
    from megatron_pulse.cli.plan.schedule_input import profile_link
    from megatron_pulse.planner.bubble_fill.encoder_table import components_of, read_table
    from megatron_pulse.planner.bubble_fill.filled_schedule import FilledSchedule
    from megatron_pulse.planner.bubble_fill.problem import FillProblem
    from megatron_pulse.planner.bubble_fill.search import FillError, fill

    assert task.samples is not None
    given = read_table(args.encoders)
    if given.origin is not None and task.profile is not None:
        warn(*given.origin.cautions(task.profile))
    with (
        as_user_error(ValueError, FillError),
        ProgressLine("filling bubbles", args.seconds, "s", timed=True),
    ):
        link = profile_link(args)
        to_fill = FillProblem(
            problem,
            found.schedule,
            components_of(given.components, problem.placement),
            task.samples * problem.num_microbatches,
            link=link,
        )
        return FilledSchedule.of(to_fill, fill(to_fill, args.seconds), found.certificate, link)


def _answer(args: argparse.Namespace, task: ScheduleInput) -> tuple[ScheduleProblem, Synthesis]:
    """Schedule asked for, and the problem on its placement."""
    from megatron_pulse.planner.schedule.cache import cached
    from megatron_pulse.planner.schedule.solve import solve

    if args.schedule is not None:
        return _own(args, task)
    if args.name != "auto":
        return _named(args, task)
    problem = task.split if args.split else task.whole
    assert problem is not None
    with (
        as_user_error(ValueError),
        ProgressLine("searching a schedule", args.seconds, "s", timed=True),
    ):
        if args.no_cache:
            return problem, solve(problem, args.seconds, args.solver)
        return problem, cached(problem, args.seconds, args.solver, solve)


def _named(args: argparse.Namespace, task: ScheduleInput) -> tuple[ScheduleProblem, Synthesis]:
    """Classic schedule on the placement asked for, or else on its own."""
    from megatron_pulse.planner.schedule.classic.compare import rival

    with as_user_error(ValueError):
        if args.placement is None:
            found = rival(args.name, task.whole, task.split)
            return _evaluated(args, found.problem, found.schedule)
        problem = task.split if args.name in SPLIT else task.whole
        if problem is None:
            raise ValueError(f"{args.name}: times of input and weight gradients are not known")
        schedule = CLASSICS[args.name](problem.placement, args.microbatches)
    return _evaluated(args, problem, schedule)


def _own(args: argparse.Namespace, task: ScheduleInput) -> tuple[ScheduleProblem, Synthesis]:
    """Schedule of ``--schedule``; raises UserError with all of its faults."""
    from megatron_pulse.planner.schedule.serialize import from_csv

    try:
        schedule = from_csv(
            read_text(args.schedule, FileKind.SCHEDULE), task.whole.placement, args.schedule.stem
        )
    except ValueError as error:
        raise UserError(f"--schedule {args.schedule}: {error}") from error
    splits = OpType.WEIGHT_GRAD in schedule.kinds
    problem = task.split if splits else task.whole
    if problem is None:
        raise UserError(
            f"--schedule {args.schedule} splits backwards, but the times of input and weight "
            "gradients are not known"
        )
    return _evaluated(args, problem, schedule)


def _evaluated(
    args: argparse.Namespace, problem: ScheduleProblem, schedule: Schedule
) -> tuple[ScheduleProblem, Synthesis]:
    """Evaluation of a given schedule; only an explicit cap is enforced."""
    from megatron_pulse.cli.plan.schedule_input import cap
    from megatron_pulse.planner.schedule.bound.bounds import lower_bound
    from megatron_pulse.planner.schedule.check.simulate import simulate as simulate
    from megatron_pulse.planner.schedule.check.validate import faults_for
    from megatron_pulse.planner.schedule.problem import Certificate, Synthesis

    limit = None if args.cap is None else cap(args, problem.placement, ())
    with as_user_error(ValueError):
        problem = replace(problem, cap=limit)
    name = args.schedule or schedule.name
    require([f"{name}: {fault}" for fault in faults_for(problem, schedule)])
    length, least = simulate(problem, schedule).makespan, lower_bound(problem)
    proved = length <= least * (1 + 1e-9)
    found = Certificate(length, least, proved, f"none: {schedule.name} as it is", 0.0)
    return problem, Synthesis(schedule, found)


def _cap(text: str) -> float:
    return math.inf if text == "none" else float(text)


def _faults(args: argparse.Namespace) -> list[str]:

    faults = command_faults(args)
    if args.encoders is not None:
        if args.times is not None:
            faults.append("--encoders is for --profile: --times has no number of samples")
        if args.csv is not None:
            faults.append("--csv holds no encoders: write a plan with 'pulse tune --encoders'")
    if args.times is not None:
        for flag, value, instead in (
            ("--link-gbs", args.link_gbs, "write 'link' into the file of times"),
            ("--link-us", args.link_us, "write 'link' into the file of times"),
            ("--micro-batch-size", args.micro_batch_size, "times are of one microbatch"),
        ):
            if value is not None:
                faults.append(f"{flag} is for --profile; {instead}")
    if args.waves is not None and args.placement and not PLACEMENTS[args.placement].chunk_step:
        faults.append(f"--waves: a device of {args.placement} hosts one stage")
    if args.cap is not None and not args.cap > 0:
        faults.append(f"--cap is {args.cap:g}; it must be above 0")
    if args.name != "auto" or args.schedule is not None:
        if args.split:
            faults.append("--split is for synthesized schedules; a given one splits or does not")
        searching = {
            "--solver": args.solver != "auto",
            "--no-cache": args.no_cache,
            "--seconds": args.seconds is not None and args.encoders is None,
        }
        faults += [
            f"{flag} is for synthesized schedules; a given one is taken as it is"
            for flag, given in searching.items()
            if given
        ]
    return faults
