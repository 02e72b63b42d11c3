"""Checks of the run's layers (local or Transformer Engine) against plan and profile."""

from __future__ import annotations

import argparse

from megatron_pulse.backbone.build_context import TRANSFORMER_ENGINE
from megatron_pulse.integration.megatron.te_wgrad import (
    OLDEST_TE_WITH_DEFERRED_WGRAD,
    te_can_defer_wgrad,
)
from megatron_pulse.planner.program.plan import Plan, PlanError
from megatron_pulse.planner.schedule.registry import splits
from megatron_pulse.profile.profile import Profile, ProfileError, Source


def require_same_transformer_impl(args: argparse.Namespace, profile: Profile, given: str) -> None:
    """Raise ProfileError if ``profile`` was measured with another layer implementation.

    ``given`` is the flag that named the profile.
    """
    theirs, ours = profile.transformer_impl, args.transformer_impl
    if profile.source is Source.MEASURED and theirs != ours:
        raise ProfileError(
            f"{given} was measured with --transformer-impl {theirs}, but the run uses {ours}. "
            f"Measure with 'pulse profile --transformer-impl {ours}', or run with "
            f"--transformer-impl {theirs}"
        )


def require_deferrable_wgrad(args: argparse.Namespace, plan: Plan) -> None:
    """Raise PlanError for a split schedule of layers that cannot defer weight gradients."""
    if can_split_backward(args) or not splits(plan.schedule_name):
        return
    raise PlanError(
        f"the schedule ({plan.schedule_name}) splits the backward, and Transformer Engine defers "
        f"weight gradients from version {OLDEST_TE_WITH_DEFERRED_WGRAD} on. Install it (pip "
        f"install 'transformer-engine[pytorch]>={OLDEST_TE_WITH_DEFERRED_WGRAD}'), use a schedule "
        "without split backward (--pulse-schedule wave; 'pulse tune --no-split-backward'), or "
        "--transformer-impl local"
    )


def can_split_backward(args: argparse.Namespace) -> bool:
    """True if the run's layers can defer weight gradients."""
    return args.transformer_impl != TRANSFORMER_ENGINE or te_can_defer_wgrad()
