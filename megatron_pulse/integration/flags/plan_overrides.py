"""Plan file instead of flags: its decisions are filled in, contradicting flags are refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from megatron_pulse.dataclass_flags import flag_name, marked
from megatron_pulse.integration.flags.fsdp_flags import FSDP_FLAGS, FsdpChoice
from megatron_pulse.integration.flags.parse import CommandLine
from megatron_pulse.integration.flags.pulse_options import TRAINED_FLAGS, FlagMark, PulseOptions
from megatron_pulse.planner.partition.memory import ADAM_BYTES
from megatron_pulse.planner.plan_file.equivalent_flags import decided_flags
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.profile.channels_last import OPTION, in_format_of, in_given_format
from megatron_pulse.profile.optimizer_state import optimizer_bytes
from megatron_pulse.profile.trainable import identity, trained_part
from model_specs import in_dtype, is_module, load_backbone, load_recorded


def apply_plan(plan: PlanFile, args: argparse.Namespace, options: PulseOptions) -> PulseOptions:
    """Fill ``args`` and ``options`` with the decisions of ``plan``.

    ``contradictions`` reports flags with other values. The flag of self-conditioning changes no
    layout, and precedes the plan. A module keeps the name given, which tells where its weights are.
    """
    for name, value in decided_flags(plan).items():
        setattr(args, name, value)
    args.pulse_fsdp = plan.fsdp is not None
    own = options.self_conditioning or plan.self_conditioning or None
    args.pulse_self_conditioning = own
    part = trained_part(plan.backbone)
    return replace(
        options,
        self_conditioning=own,
        backbone=options.backbone if is_module(options.backbone or "") else plan.backbone["name"],
        options=dict(in_given_format(plan.backbone, options.options)["options"]),
        train=part.train,
        freeze=part.freeze,
        adapter=options.adapter.of_record(part.adapter, part.quantization),
        fully_sharded=FsdpChoice.of(plan.fsdp),
        placement=str(plan.placement.kind),
        num_chunks=plan.placement.num_chunks,
    )


def contradictions(
    plan: PlanFile, line: CommandLine, options: PulseOptions, by: str = "--pulse-plan"
) -> Iterator[str]:
    """Fault for each given flag that contradicts ``plan``, which flag ``by`` brought."""
    args = line.args
    if args.world_size != plan.world_size:
        yield (
            f"{by} is for {plan.world_size} ranks ({plan.degrees}), but {args.world_size} ranks "
            "were started"
        )
    placement = plan.placement
    planned = {
        **decided_flags(plan),
        "pulse_placement": str(placement.kind),
        "pulse_num_chunks": placement.num_chunks,
    }
    for name, value in planned.items():
        flag, given = flag_name(name), getattr(args, name)
        if line.says(flag) and given != value:
            said = "has no such flag" if value is None else f"says {value}"
            yield f"{flag} {given}, but {by} {said}. Leave the flag out"
    if options.training_loss.is_preference and not plan.dpo:
        yield f"--pulse-loss dpo: {by} counts no pass of the reference. Make it anew with --dpo"
    elif plan.dpo and not options.training_loss.is_preference:
        yield (
            f"{by} counts a pass of the reference in every step. Give --pulse-loss dpo, or make it "
            "anew without --dpo"
        )
    if options.sdc_check_interval and plan.mixed:
        yield (
            f"--pulse-sdc-check-interval: {by} is for devices of several kinds, which do not "
            "reproduce each other's bits. Leave the flag out"
        )
    in_a_row = options.bucket_batch
    if plan.shapes and in_a_row not in (None, plan.global_batch_size):
        yield (
            f"--pulse-bucket-batch {in_a_row} mixes buckets within a step, but {by} has a schedule "
            "for steps of each bucket. Leave the flag out, or make the plan anew with "
            "'pulse tune --mix-buckets'"
        )
    if options.ema_decay and not plan.ema:
        yield (
            f"{by} reserves no memory for an EMA of the weights. Give --pulse-ema-decay 0, or "
            "make the plan without --no-ema"
        )
    if plan.optimizer_bytes < ADAM_BYTES:
        momentum, planned_bytes = args.sgd_momentum > 0, plan.optimizer_bytes
        needed = optimizer_bytes(args.optimizer, load_recorded(plan.backbone), momentum)
        if needed > planned_bytes + 1e-6:
            yield (
                f"--optimizer {args.optimizer} keeps {needed:.3g} bytes of state per parameter, "
                f"but {by} reserves {planned_bytes:.3g}. Give the planned optimizer, or make the "
                f"plan anew with --optimizer {args.optimizer}"
            )
    if options.backbone or set(options.options) - {OPTION}:
        name = options.backbone or plan.backbone["name"]
        try:
            planned_record = in_given_format(plan.backbone, options.options)
            decided = identity(load_recorded(planned_record).record)
            given = in_format_of(plan.backbone, name, options.options)
            here = in_dtype(name, given, plan.dtype, by)
            same = identity(load_backbone(name, here).record) == decided
        except ValueError as error:
            yield str(error)
            same = True  # reported already
        if not same:
            flag = "--pulse-module" if is_module(name) else "--pulse-backbone"
            yield (
                f"{flag} {name} with these options differs from the backbone of {by} "
                f"({plan.backbone['name']}). Leave both flags out, or tune for this backbone"
            )
    ours, theirs = options.trained_part, trained_part(plan.backbone)
    same = ours[:2] == theirs[:2] and options.adapter.describes(theirs.adapter)
    if any(ours) and not same:
        yield f"{TRAINED_FLAGS} say {ours}, but {by} says {theirs}. Leave the flags out"
    yield from decided_by(by, line)


def decided_by(by: str, line: CommandLine) -> Iterator[str]:
    """Fault for each given ``--pulse-*`` flag that ``by`` (--pulse-plan or -auto) decides."""
    names = list(marked(PulseOptions, FlagMark.PLAN))
    if by == "--pulse-auto":
        kept = marked(PulseOptions, FlagMark.AUTO)
        names = [n for n in ("placement", "num_chunks", *names) if n not in kept]
    for name in names:
        flag = flag_name(f"pulse_{name}")
        if line.says(flag):
            given = getattr(line.args, f"pulse_{name}")
            yield f"{flag} {given} and {by} exclude each other (the plan decides it): leave one out"
    for flag in FSDP_FLAGS:
        if line.says(flag):
            yield f"{flag} and {by} exclude each other (the plan decides it): leave one out"
