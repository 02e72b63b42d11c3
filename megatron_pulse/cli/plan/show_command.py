"""``pulse show``: print and draw a plan."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import add_flag, add_parser, command_faults, require, warn
from megatron_pulse.cli.shared_flags import add_drawing, add_plan

if TYPE_CHECKING:
    from megatron_pulse.planner.plan_file.plan_file import PlanFile

_DESCRIPTION = """\
Shows degrees and rank order, the stages, load and memory of each device, the predicted step, the
origin of the plan, and the command that runs it.

A small schedule is printed as a grid with a row per device (--grid: a large one too). F2:0 is the
forward of stage 2 on microbatch 0; B its backward, or I and W its input and weight gradient; R
recomputation in a bubble; O the end of an offload, L the begin of its load; '-' goes on, '.' is
idle.

--layers lists each layer and the sum of each stage: times, bytes that it saves for its backward,
bytes that it keeps until then, bytes that wait for the weight gradient, and its activation policy.
Replicated embedders count with the first layer that needs them.

A certificate of 'pulse verify' beside the plan, or named by --verified, is printed too. It is valid
only for a plan that runs alike; changes since are listed.

-o writes, by its ending,

  .svg    timeline of a step: forwards light, backwards dark, weight gradients hatched, messages
          below each device, stages on the way back striped
  .html   self-contained report: timeline, predictions, memory, messages, origin, command, partition
  .json   events for ui.perfetto.dev

Times are of one pipeline, with contention on its links.

examples:
  pulse show plan.json
  pulse show plan.json --layers
  pulse show plan.json -o timeline.svg
  pulse show plan.json -o report.html
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show``."""
    parser = add_parser(commands, "show", "show what a plan does", _DESCRIPTION, run)
    add = partial(add_flag, parser)
    add_plan(parser)
    add_drawing(parser)
    add("--grid", "print the grid at any width")
    add(
        "--verified JSON",
        "certificate of 'pulse verify' (default: the one beside PLAN)",
        reads=True,
    )
    add("--layers", "list all layers with their activations")
    add("--bucket NAME", "show the steps of this bucket, of those listed without it", type=str)


def run(args: argparse.Namespace) -> None:
    """Print, then draw."""
    require(command_faults(args))
    from megatron_pulse.cli.plan.plan_text import describe
    from megatron_pulse.planner.tune.plans.verify_figures import load_checked

    plan = load_checked(args.plan)
    certificate = _certificate(args, plan)
    if args.bucket is not None:
        plan = plan.of_bucket(args.bucket)
    replayed = plan.simulate_step()
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
        return ["", f"verified: not valid: {path} is of a plan that runs differently; {anew}"]
    first, *rest = found.lines()
    since = [f"  made with {said}; {anew}" for said in other_versions(found)]
    return ["", f"verified ({path}): {first}", *rest, *since]
