"""Whose linears and attention a run has, and what its plan and profile must know of that."""

from __future__ import annotations

import argparse

from megatron_pulse.backbone.context import TRANSFORMER_ENGINE
from megatron_pulse.planner.schedule.registry import splits
from megatron_pulse.planner.step.plan import Plan, PlanError
from megatron_pulse.profile.profile import Profile, ProfileError, Source


def require_own_layers(args: argparse.Namespace, profile: Profile, given: str) -> None:
    """Raise ProfileError where ``profile``, of the flag ``given``, was measured with other layers
    than the run's."""
    theirs, ours = profile.transformer_impl, args.transformer_impl
    if profile.source is Source.MEASURED and theirs != ours:
        raise ProfileError(
            f"{given} was measured with layers of {theirs}, and the run has those of {ours}: "
            f"measure with 'pulse profile --transformer-impl {ours}', or run with "
            f"--transformer-impl {theirs}"
        )


def require_whole_backwards(args: argparse.Namespace, plan: Plan) -> None:
    """Raise PlanError for a split schedule of Transformer Engine's layers.

    Theirs come with those of inputs, and the schedule would wait for nothing. What they have for
    that (2.20.2: ``WeightGradStore`` of ``module/_common.py``, ``backward_dw`` of
    ``module/base.py``) does not do it as it is. Each module has one queue, to which every call of
    it adds, and a call of ``backward_dw`` takes one entry: neither knows of microbatches, and a
    module that a stage calls twice needs two. Without fused accumulation it assigns a weight's
    gradient in place of adding to it, and drops a bias's where there is one already: only the hooks
    of a DDP that has ``delay_wgrad_compute`` too add up. And Megatron's configuration wants
    ``overlap_moe_expert_parallel_comm`` with it. A store that hands each entry, a product that is
    still to be computed, to the microbatch's ``Later`` would do without all this; it is not
    written.
    """
    if args.transformer_impl == TRANSFORMER_ENGINE and splits(plan.schedule_name):
        raise PlanError(
            f"the schedule ({plan.schedule_name}) splits backwards, and Transformer Engine's "
            "layers compute weight gradients with those of inputs (their backward_dw takes what a "
            "module queued first, whatever the microbatch, and assigns gradients, adding none): "
            "take a schedule that does not (--pulse-schedule wave; 'pulse tune --no-split'), or "
            "--transformer-impl local"
        )
