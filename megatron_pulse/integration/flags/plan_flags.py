"""A plan file in place of flags: what it decides is filled in, what contradicts it is refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_pulse.flag_fields import flag_name, marked
from megatron_pulse.integration.flags.arguments import Mark, PulseOptions
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from model_specs import load_backbone, load_recorded


def obey(plan: PlanFile, args: argparse.Namespace, options: PulseOptions) -> PulseOptions:
    """Fill ``args`` and ``options`` with what ``plan`` decides.

    Flags that say otherwise are ``contradictions``.
    """
    for name, (_, value) in _decided(plan).items():
        setattr(args, name, value)
    return replace(
        options,
        backbone=plan.backbone["name"],
        options=dict(plan.backbone["options"]),
        placement=str(plan.placement.kind),
        num_chunks=plan.placement.num_chunks,
    )


def _decided(plan: PlanFile) -> dict[str, tuple[Any, Any]]:
    """Megatron's flags that a plan decides: their defaults, and what they must be."""
    return {
        "pipeline_model_parallel_size": (1, plan.pipeline),
        "tensor_model_parallel_size": (1, plan.tensor),
        "sequence_parallel": (False, plan.sequence_parallel),
        "micro_batch_size": (None, plan.micro_batch_size),
        "global_batch_size": (None, plan.global_batch_size),
        "recompute_granularity": (None, "full" if plan.recompute else None),
        "use_distributed_optimizer": (False, plan.distributed_optimizer),
        "overlap_grad_reduce": (False, plan.overlap_grad_reduce),
        "use_tp_pp_dp_mapping": (False, plan.rank_order == "tp-pp-dp"),
        "bf16": (False, plan.dtype == "bfloat16"),
        "fp16": (False, plan.dtype == "float16"),
    }


def contradictions(
    plan: PlanFile, args: argparse.Namespace, options: PulseOptions
) -> Iterator[str]:
    """Each flag that says otherwise than ``plan``; one at its default says nothing."""
    if args.world_size != plan.world_size:
        yield (
            f"--pulse-plan is for {plan.world_size} ranks (pipeline {plan.pipeline} x data "
            f"{plan.data} x tensor {plan.tensor}), but {args.world_size} were started"
        )
    for name, (default, value) in _decided(plan).items():
        given = getattr(args, name)
        if given not in (default, value):
            yield f"{flag_name(name)} {given}, but --pulse-plan says {value}: leave the flag out"
    if options.backbone or options.options:
        name = options.backbone or plan.backbone["name"]
        try:
            decided = load_recorded(plan.backbone).record
            same = load_backbone(name, options.options).record == decided
        except ValueError as error:
            yield str(error)
            same = True  # that is said
        if not same:
            yield (
                f"--pulse-backbone {name} with these options is not what --pulse-plan is of "
                f"({plan.backbone['name']}): leave both flags out, or tune for this backbone"
            )
    default = PulseOptions()
    placement = plan.placement
    layout = {"placement": str(placement.kind), "num_chunks": placement.num_chunks}
    for name, planned in layout.items():
        given = getattr(options, name)
        if given not in (getattr(default, name), planned):
            flag = flag_name(f"pulse_{name}")
            yield f"{flag} {given}, but --pulse-plan says {planned}: leave the flag out"
    yield from decided_by("--pulse-plan", options)


def decided_by(flag: str, options: PulseOptions) -> Iterator[str]:
    """Each of ``options`` that is given although ``flag`` (--pulse-plan or -auto) decides it."""
    default = PulseOptions()
    kept = marked(PulseOptions, Mark.AUTO) if flag == "--pulse-auto" else ()
    for name in marked(PulseOptions, Mark.PLAN):
        given = getattr(options, name)
        if name not in kept and given != getattr(default, name):
            ours = flag_name(f"pulse_{name}")
            yield f"{ours} {given} together with {flag}, which decides that: leave one out"
