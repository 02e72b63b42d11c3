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

    They can leave weight gradients for later (``delay_wgrad_compute``, then ``backward_dw``, first
    in, first out), which has not been run yet: theirs would come with those of inputs, and the
    schedule wait for nothing.
    """
    if args.transformer_impl == TRANSFORMER_ENGINE and splits(plan.schedule_name):
        raise PlanError(
            f"the schedule ({plan.schedule_name}) splits backwards, and Transformer Engine's "
            "layers compute weight gradients with those of inputs: take a schedule that does not "
            "(--pulse-schedule wave; 'pulse tune --no-split'), or --transformer-impl local"
        )
