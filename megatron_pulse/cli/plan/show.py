"""``pulse show``: print and draw a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.errors import add_parser, check_file, missing_file_faults, require, warn
from megatron_pulse.cli.output import DRAWINGS, overwrite_faults

if TYPE_CHECKING:
    from megatron_pulse.planner.plan_file.plan_file import PlanFile

_DESCRIPTION = """\
Tells what a plan does: degrees and rank order, what each device holds and how long it works, idles
and sends, what is predicted of a step, where all of that is from, and how to run it. A small
schedule is also printed as a grid, a row for each device (--grid: a large one too): F2:0 is the
forward of stage 2 on microbatch 0, B its backward, or I and W its input and weight gradient; R, in
time that would be idle, computes activations again for the backward that comes; at O they have left
for the node's memory, at L they begin to come back; '-' goes on, '.' is idle. --layers lists of
each layer, and of each stage the sum, how long it computes as the plan has it (embedders that run
on every device with the first layer that needs them), what it would save of a microbatch for its
backward, what of that it keeps until then and, with split backwards, until the weight gradient, and
whether the rest is computed again or on the host.

A certificate of 'pulse verify' beside the plan, or named by --verified, is printed too, with what
has changed since it was made: it is valid for a plan that runs alike, and no other.

-o writes, by its ending,

  .svg    the timeline of a step: forwards light, backwards dark, weight gradients hatched; below
          each device what it sends; stages on the way back striped. Reads without colour.
  .html   a report that needs no other file: that timeline, predicted figures, memory, messages,
          provenance, the command, and a picture of the partition
  .json   events for ui.perfetto.dev

Times are of one pipeline, with messages taking their turns on links.

examples:
  pulse show plan.json
  pulse show plan.json --layers
  pulse show plan.json -o timeline.svg
  pulse show plan.json -o report.html
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show``."""
    parser = add_parser(commands, "show", "show what a plan does", _DESCRIPTION, run)
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN", help="what 'pulse tune' wrote")
    add("-o", "--output", type=Path, metavar="FILE", help=".svg, .html or .json, see above")
    add("--grid", action="store_true", help="print the grid, however wide")
    add("--verified", type=Path, metavar="JSON", help="a certificate (default: that beside PLAN)")
    add("--layers", action="store_true", help="list all layers, and what they keep")


def run(args: argparse.Namespace) -> None:
    """Print, then draw."""
    faults = check_file(args.output, "-o", *DRAWINGS)
    faults += missing_file_faults(verified=args.verified)
    require([*faults, *overwrite_faults({"-o": args.output}, args.plan, args.verified)])
    from megatron_pulse.cli.plan.plan_text import describe
    from megatron_pulse.planner.tune.plans.verify_figures import load_checked

    plan = load_checked(args.plan)
    replayed = plan.simulate_step()
    certificate = _certificate(args, plan)
    print("\n".join([*describe(plan, replayed, args.plan, args.grid, args.layers), *certificate]))
    if args.output is not None:
        from megatron_pulse.cli.plan.plan_html import write_page

        print(write_page(plan, replayed, args.plan, args.output))


def _certificate(args: argparse.Namespace, plan: PlanFile) -> list[str]:
    """Lines on the certificate that is named or lies beside the plan, and on its validity."""
    from megatron_pulse.planner.plan_file.certificate import (
        VerificationError,
        certificate_path,
        digest_of,
        load_verification,
        other_versions,
    )

    path = args.verified or certificate_path(args.plan)
    if not path.is_file():
        return []
    try:
        found = load_verification(path)
    except VerificationError as error:
        if args.verified is not None:
            raise
        warn(str(error))
        return []
    anew = f"verify it anew: pulse verify {args.plan}"
    if found.plan != digest_of(plan):
        return ["", f"verified: not valid: {path} is of a plan that runs otherwise; {anew}"]
    first, *rest = found.lines()
    since = [f"  made with {said}; {anew}" for said in other_versions(found)]
    return ["", f"verified ({path}): {first}", *rest, *since]
