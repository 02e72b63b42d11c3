"""Whose linears and attention a run has, and what its plan and profile must know of that."""

from __future__ import annotations

import argparse

from megatron_pulse.backbone.context import TRANSFORMER_ENGINE
from megatron_pulse.integration.megatron.engine import OLDEST_THAT_WAITS, engine_waits
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


def require_waiting_layers(args: argparse.Namespace, plan: Plan) -> None:
    """Raise PlanError for a split schedule of layers whose weight gradients cannot wait."""
    if may_split(args) or not splits(plan.schedule_name):
        return
    raise PlanError(
        f"the schedule ({plan.schedule_name}) splits backwards, and weight gradients of "
        f"Transformer Engine's layers can wait from {OLDEST_THAT_WAITS} on: install that "
        f"(pip install 'transformer-engine[pytorch]>={OLDEST_THAT_WAITS}'), take a schedule that "
        "does not split (--pulse-schedule wave; 'pulse tune --no-split'), or --transformer-impl "
        "local"
    )


def may_split(args: argparse.Namespace) -> bool:
    """Whether weight gradients of the run's layers can wait."""
    return args.transformer_impl != TRANSFORMER_ENGINE or engine_waits()
