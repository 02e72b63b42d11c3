"""``pulse check``: whether a plan can run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.errors import add_parser, mending, require, warn
from megatron_pulse.cli.output import add_json, answer, columns

if TYPE_CHECKING:
    from megatron_pulse.planner.plan_file.plan_file import PlanFile

_DESCRIPTION = """\
Looks at everything that a run with --pulse-plan would stumble over, and lists all faults at once:

  form       the file has every field, and each is what it may be
  schedule   every operation is there once, on its device, and nothing waits in a circle
  backbone   the stages hold the layers of the backbone's chain, each once and in order
  skips      both ends of each are on one device, or it has a route of its own
  messages   compiled for every device, and no order of NCCL calls can block
  memory     activations at their peak keep within what each device has for them, and all that a
             device holds within its memory
  ranks      the machines have as many

Needs no GPU and no other rank. The exit status is 0 for a plan that can run, else 2.

examples:
  pulse check plan.json
  pulse check plan.json --json | jq .faults
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check``."""
    parser = add_parser(commands, "check", "say whether a plan can run", _DESCRIPTION, run)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what 'pulse tune' wrote")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Check, then print."""
    from megatron_pulse.planner.plan_file.plan_file import PlanFileError, read_plan
    from megatron_pulse.profile.cautions import plan_cautions

    with mending(PlanFileError):
        plan, faults = read_plan(args.plan)
    fine: dict[str, str] = {}
    if plan is not None:
        warn(*plan_cautions(plan.provenance, 0))
    if plan is not None:
        if not faults:
            fine = {"form": "as it should be", "schedule": _schedule(plan)}
        more, found = _against_the_world(plan, legal=not faults)
        faults, fine = faults + more, {**fine, **found}
    lines = []
    if plan is not None and not faults:
        lines = [
            f"{args.plan}: {plan.heading}",
            "",
            *columns(list(fine.items())),
            "",
            f"it can run: --pulse-plan {args.plan}",
        ]
    record = {"plan": str(args.plan), "can_run": not faults, "faults": faults, "checked": fine}
    if lines or args.json:
        answer(args, lines, lambda: record)
    require([f"{args.plan}: {fault}" for fault in faults])


def _schedule(plan: PlanFile) -> str:
    count = sum(map(len, plan.schedule.order))
    return (
        f"{plan.schedule.name} of {len(plan.stages)} stages on {plan.pipeline} device(s), "
        f"{plan.num_microbatches} microbatch(es): {count} operations, legal"
    )


def _against_the_world(plan: PlanFile, legal: bool) -> tuple[list[str], dict[str, str]]:
    """The plan and its backbone, if the plan is legal in itself, and its machines."""
    from megatron_pulse.planner.plan_file.check import check_backbone, check_machines
    from model_specs import load_backbone

    name, options = plan.backbone["name"], plan.backbone["options"]
    faults: list[str] = []
    fine: dict[str, str] = {}
    try:
        backbone = load_backbone(name, options)
    except (ValueError, TypeError) as error:
        faults.append(f"backbone: {error}")
    else:
        if legal:
            faults, fine = check_backbone(plan, backbone)
    more, found = check_machines(plan)
    return faults + more, {**fine, **found}
