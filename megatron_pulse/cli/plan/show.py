"""``pulse show``: a plan for people."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.errors import add_parser, check_file, no_file, require, warn
from megatron_pulse.cli.output import DRAWINGS, overwritten

if TYPE_CHECKING:
    from megatron_pulse.backbone.costs import ChainCosts
    from megatron_pulse.planner.plan_file.plan_file import PlanFile

_DESCRIPTION = """\
Tells what a plan does: degrees and rank order, what each device holds and how long it works, idles
and sends, what is predicted of a step, where all of that is from, and how to run it. A small
schedule is also printed as a grid, a row for each device (--grid: a large one too): F2:0 is the
forward of stage 2 on microbatch 0, B its backward, or I and W its input and weight gradient; '-'
goes on, '.' is idle.

-o writes, by its ending,

  .svg    the timeline of a step: forwards light, backwards dark, weight gradients hatched; below
          each device what it sends; stages on the way back striped. Reads without colour.
  .html   a report that needs no other file: that timeline, predicted figures, memory, messages,
          provenance, the command; with --profile a picture of the partition
  .json   events for ui.perfetto.dev

Times are of one pipeline, with messages taking their turns on links.

examples:
  pulse show plan.json
  pulse show plan.json -o timeline.svg
  pulse show plan.json -o report.html --profile profile.json
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show``."""
    parser = add_parser(commands, "show", "show what a plan does", _DESCRIPTION, run)
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN", help="what 'pulse tune' wrote")
    add("-o", "--output", type=Path, metavar="FILE", help=".svg, .html or .json, see above")
    add("--grid", action="store_true", help="print the grid, however wide")
    add(
        "--profile",
        type=Path,
        metavar="JSON",
        help="what the plan was made from, for the picture of the partition in a report",
    )


def run(args: argparse.Namespace) -> None:
    """Print, then draw."""
    require(_faults(args))
    from megatron_pulse.cli.plan.plan_text import describe
    from megatron_pulse.planner.plan_file.plan_file import load_plan

    plan = load_plan(args.plan)
    costs = None if args.profile is None else _costs(args.profile, plan)
    replayed = plan.replay()
    print("\n".join(describe(plan, replayed, args.plan, wide=args.grid)))
    if args.output is not None:
        from megatron_pulse.cli.plan.plan_page import write_page

        print(write_page(plan, replayed, costs, args.plan, args.output))


def _costs(path: Path, plan: PlanFile) -> ChainCosts:
    """The costs of the plan's layers; raises UserError for another chain's profile."""
    from megatron_pulse.profile.cautions import spread_caution
    from megatron_pulse.profile.files import load_profile

    profile = load_profile(path)
    names = [name for stage in plan.stages for name in stage]
    if names != [layer.name for layer in profile.layers]:
        require([f"--profile {path} is of other layers than {plan.backbone['name']} in the plan"])
    warn(spread_caution(profile))
    return profile.at(plan.micro_batch_size, plan.recompute)


def _faults(args: argparse.Namespace) -> list[str]:
    return [
        *no_file(profile=args.profile),
        *check_file(args.output, "-o", *DRAWINGS),
        *overwritten("-o", args.output, args.plan, args.profile),
    ]
