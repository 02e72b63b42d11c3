"""``pulse check``: check that a plan can run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import add_code_flag
from megatron_pulse.cli.flag_checks import add_flag, add_parser, warn
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.output import add_json, name_value_lines, print_result
from megatron_pulse.cli.shared_flags import add_plan
from megatron_pulse.errors import UserError, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import HASH, read_text
from megatron_pulse.format import in_ms

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.planner.plan_file.plan_file import PlanFile, ShapePlan

_DESCRIPTION = """\
Checks what a run with --pulse-plan needs, and lists all faults at once:

  form       every field is there and has an allowed value
  schedule   every operation is there once, on its device; there is no deadlock
  backbone   the stages hold every layer of the chain once and in order; boundaries have the bytes
             that the plan counts; with --count, layers have its numbers of parameters
  skips      collocated, or with a route of their own
  messages   compiled for every device; no order of NCCL calls can block
  figures    times, messages, memory and predictions follow from the layer costs of this backbone
             and the simulated schedule; no lower bound is above it
  buckets    the schedule, figures and memory of the steps of each bucket, if they have their own
  context    the tokens can be divided, and ranks exchange the bytes that the plan counts
  memory     activations and all state fit each device
  ranks      the cluster has as many

Needs no GPU and no other rank; only --count and context parallelism need torch. The exit status is
0 for a plan that can run, else 2.

examples:
  pulse check plan.json
  pulse check plan.json --count
  pulse check plan.json --json | jq .faults
"""


_REMEDY = (
    "make the plan anew with 'pulse tune', or undo the edit: costs, decisions and figures of a "
    "plan belong together (--pulse-recompute, --pulse-recompute-selective and --pulse-offload set "
    "activation policies without a plan)"
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check``."""
    parser = add_parser(commands, "check", "check that a plan can run", _DESCRIPTION, run)
    add_plan(parser)
    add_code_flag(parser, "the plan")
    add_flag(parser, "--count", "also count parameters (takes seconds)")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Check, then print."""
    from megatron_pulse.planner.plan_file.equivalent_flags import NO_AVERAGES
    from megatron_pulse.planner.plan_file.plan_file import PlanFileError, read_plan
    from megatron_pulse.profile.warnings import plan_cautions

    try:
        record, plan, faults = read_plan(args.plan)
    except PlanFileError as error:  # no plan of this version at all
        if args.json:
            verdict = _verdict(args.plan, [str(error)], {})
            print_result(args, [], lambda: verdict)
        raise
    fine: dict[str, str] = {}
    if record is not None:
        warn(*plan_cautions(record["provenance"], 0))
        legal = plan
        if plan is not None and not faults:
            fine = {"form": _form(args.plan), "schedule": _schedule(plan)}
        elif plan is not None and not _is_legal(record, plan):
            legal = None
        more, found = _against_the_world(record, legal, args.count)
        faults, fine = faults + more, {**fine, **found}
    lines = []
    if plan is not None and not faults:
        lines = [
            f"{args.plan}: {plan.heading}",
            "",
            *name_value_lines(list(fine.items())),
            "",
            f"it can run: --pulse-plan {args.plan}" + f" {NO_AVERAGES}" * (not plan.ema),
        ]
    if lines or args.json:
        print_result(args, lines, lambda: _verdict(args.plan, faults, fine))
    if faults:
        raise UserError(format_faults(str(args.plan), faults, _REMEDY))


def _is_legal(record: dict[str, Any], plan: PlanFile) -> bool:
    """True if figures can be recomputed: schedules are legal, and so are sharded units."""
    from megatron_pulse.planner.plan_file.consistency import fsdp_faults
    from megatron_pulse.planner.schedule.check.validate import faults_for

    plans = [plan, *(shape.plan for shape in plan.shapes)]
    if any(faults_for(each.problem, each.schedule) for each in plans):
        return False
    return plan.fsdp is None or not any(fsdp_faults(record))


def _verdict(path: Path, faults: list[str], fine: dict[str, str]) -> dict[str, Any]:
    return {"plan": str(path), "can_run": not faults, "faults": faults, "checked": fine}


def _form(path: Path) -> str:
    if HASH in read_text(path, FileKind.PLAN)[: 2 * len(HASH)]:
        return "ok"
    return f"ok, but without its line {HASH!r}: some edits and damage are not seen"


def _schedule(plan: PlanFile) -> str:
    count = sum(map(len, plan.schedule.order))
    return (
        f"{plan.schedule.name} of {len(plan.stages)} stages on {plan.pipeline} device(s), "
        f"{plan.num_microbatches} microbatch(es): {count} operations, legal"
    )


def _figures(plan: PlanFile) -> str:
    known = plan.provenance["schedule"]
    return (
        f"follow from the costs of {len(plan.profile.layers)} layers; makespan "
        f"{in_ms(known['makespan'])}, lower bound {in_ms(known['lower_bound'])}, without link "
        "contention"
    )


def _bucket(shape: ShapePlan) -> str:
    plan, known = shape.plan, shape.plan.provenance["schedule"]
    return (
        f"{shape.name}: {plan.num_microbatches} microbatch(es) of {plan.micro_batch_size}, "
        f"makespan {in_ms(known['makespan'])}, lower bound {in_ms(known['lower_bound'])}"
    )


def _bucket_faults(plan: PlanFile, backbone: Backbone) -> list[str]:
    """Faults of the plans of all buckets against the backbone at their shapes."""
    from megatron_pulse.backbone.shape_buckets import at_shape, shape_names
    from megatron_pulse.planner.plan_file.compatibility import check_backbone

    names = shape_names(backbone)
    given = [shape.name for shape in plan.shapes]
    if not given or given != names:
        told = f"shapes are {', '.join(given)}; those of {backbone.name} are {', '.join(names)}"
        return [told] if given else []
    return [
        f"shapes, {shape.name}: {fault}"
        for number, shape in enumerate(plan.shapes)
        for fault in check_backbone(shape.plan, at_shape(backbone, number))[0]
    ]


def _against_the_world(
    record: Mapping[str, Any], plan: PlanFile | None, count: bool
) -> tuple[list[str], dict[str, str]]:
    """Faults and passed checks of the plan against its backbone and the machines of its record.

    ``plan`` is None if it is not legal in itself.
    """
    from megatron_pulse.cli.plan.check_context import check_context
    from megatron_pulse.planner.plan_file.compatibility import (
        check_backbone,
        machine_faults,
        machine_summary,
    )
    from megatron_pulse.planner.tune.plans.verify_figures import figure_faults
    from megatron_pulse.profile.parameters import count_parameters
    from megatron_pulse.profile.trainable import trained_part
    from model_specs import load_recorded

    faults: list[str] = []
    fine: dict[str, str] = {}
    parameters: tuple[int, ...] | None = None
    try:
        if count or any(trained_part(record["backbone"])):
            prepare_megatron()
        backbone = load_recorded(record["backbone"])
        if count:
            parameters = count_parameters(backbone)
    except (ValueError, TypeError, OverflowError) as error:
        faults.append(f"backbone: {error}")
    else:
        if plan is not None:
            faults, fine = check_backbone(plan, backbone, parameters)
            faults += _bucket_faults(plan, backbone)
            if plan.context > 1 and not faults:
                prepare_megatron()
                more, fine["context"] = check_context(plan, backbone)
                faults += more
    faults += machine_faults(record)
    if plan is not None:
        if not (more := figure_faults(record, plan)):
            fine["figures"] = _figures(plan)
            if plan.shapes:
                fine["buckets"] = "; ".join(map(_bucket, plan.shapes))
        faults += more
        if not faults:
            fine |= machine_summary(plan)
    return faults, fine
