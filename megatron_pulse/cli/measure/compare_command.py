"""``pulse compare``: predictions of a plan beside measurements of its run."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    command_faults,
    no_such_file,
    require,
    warn,
)
from megatron_pulse.cli.output import add_json, print_result
from megatron_pulse.cli.shared_flags import add_drawing, add_plan
from megatron_pulse.file_kinds import FileKind

if TYPE_CHECKING:
    from megatron_pulse.cli.measure.compare_report import PlanComparison

_DESCRIPTION = """\
A run with --pulse-plan PLAN --pulse-trace DIR writes DIR/trace.json, with the times of the
operations of some steps on the first pipeline. This command compares them with the plan: the median
duration of every operation type and stage, compute and waiting time of every device, makespan,
bubble, and bytes sent. It says in words where they differ most. A plan that fails 'pulse check' is
refused.

-o draws both timelines of the step of median length (.svg), with the tables (.html), or as events
for ui.perfetto.dev (.json).

--profile with --write-profile scales the profile's layers to the measured times of their stages,
for the next plan.

examples:
  pulse compare plan.json runs/trace/trace.json
  pulse compare plan.json runs/trace -o both.svg
  pulse compare plan.json runs/trace --profile profile.json --write-profile measured.json
  pulse tune --profile measured.json --cluster cluster.yaml --global-batch-size 256 -o next.json
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``compare``."""
    parser = add_parser(commands, "compare", "compare a run with its plan", _DESCRIPTION, run)
    add = partial(add_flag, parser)
    add_plan(parser)
    add("trace TRACE", "trace.json of the run, or its folder", reads=True)
    add_drawing(parser)
    add_json(parser)
    add("--profile JSON", "profile that the plan was made from", reads=True)
    add("--write-profile JSON", "write --profile, scaled to the measured times", writes=[".json"])


def run(args: argparse.Namespace) -> None:
    """Compare, print, draw, and write the profile."""
    require(_faults(args))
    from megatron_pulse.cli.measure.compare_report import as_json, report, write_drawing

    compared = _compared(args)
    wrote = []
    if args.write_profile is not None:
        from megatron_pulse.planner.trace.compare import measured_problem
        from megatron_pulse.planner.trace.trace_to_profile import rescale
        from megatron_pulse.profile.files import load_profile, save_profile

        profile = load_profile(args.profile)
        measured = measured_problem(compared.plan.problem, compared.trace)
        scaled = rescale(profile, compared.plan, measured)
        save_profile(scaled, args.write_profile)
        wrote.append(f"profile with measured times written to {args.write_profile}")
    if args.output is not None:
        wrote.append(write_drawing(compared, args.output))
    print_result(args, [*report(compared), *wrote], partial(as_json, compared))


def _compared(args: argparse.Namespace) -> PlanComparison:
    from megatron_pulse.cli.measure.compare_report import PlanComparison
    from megatron_pulse.planner.trace.compare import compare, cost_cautions, mismatches
    from megatron_pulse.planner.trace.trace import load_trace
    from megatron_pulse.planner.tune.plans.verify_figures import load_checked

    path = args.trace / "trace.json" if args.trace.is_dir() else args.trace
    plan, trace = load_checked(args.plan), load_trace(path)
    if plan.shapes:
        if args.write_profile is not None:
            require(["--write-profile: not for a plan with a schedule for each bucket"])
        plan = plan.of_bucket(trace.run.get("bucket", ""))
    require([f"{path}: {fault}" for fault in mismatches(plan, trace)])
    warn(*cost_cautions(plan, trace))
    replayed = plan.simulate_step()
    return PlanComparison(plan, trace, replayed, compare(replayed.timeline, trace))


def _faults(args: argparse.Namespace) -> list[str]:
    faults = [
        no_such_file(what, path, kind)
        for what, path, kind in (
            ("PLAN", args.plan, FileKind.PLAN),
            ("TRACE", args.trace, FileKind.TRACE),
        )
        if not path.exists()
    ]
    if (args.profile is None) != (args.write_profile is None):
        faults.append("--profile and --write-profile: give both")
    return faults + command_faults(args)
