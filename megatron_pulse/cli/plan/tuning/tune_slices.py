"""Search of ``pulse tune`` with whole layers and with slices of their tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_pulse.cli.plan.tuning.tune_input import evaluator_of, run_search

if TYPE_CHECKING:
    from megatron_pulse.planner.cluster.cluster import Cluster
    from megatron_pulse.planner.tune.config import Choices
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.search.result import Tuning
    from megatron_pulse.profile.profile import Profile


def search_with_slices(
    args: argparse.Namespace, profile: Profile, where: Cluster, choices: Choices
) -> tuple[Tuning, Evaluator]:
    """Fastest search result with its evaluator; raises UntunableError if nothing fits.

    Slices save memory and take time. They are tried if the profile has their costs, and whole
    layers do not fit, or need recomputation or offload.
    """
    from megatron_pulse.planner.tune.tune import UntunableError

    best: tuple[Tuning, Evaluator] | None = None
    refused: UntunableError | None = None
    for count in (profile.token_slices, *sorted(profile.sliced)):
        evaluator = evaluator_of(args, profile.in_slices(count), where)
        try:
            found = run_search(args, evaluator, choices)
        except UntunableError as error:
            refused = refused or error
            continue
        if best is None or found.outcomes[0].throughput > best[0].outcomes[0].throughput:
            best = found, evaluator
        if count == profile.token_slices and not found.outcomes[0].stages.activations:
            break
        if found.stopped:
            break
    if best is None:
        assert refused is not None
        raise refused
    return best
