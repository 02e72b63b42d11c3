"""Data parallelism on the same cluster: a baseline that a plan has to beat, and with frozen weights
in host memory an outcome of its own."""

from __future__ import annotations

from dataclasses import replace

from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fsdp.baseline import ALIKE
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.refine import finish
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.search import search

SECONDS = 2.0
"""Seconds of search."""


def data_parallel(evaluator: Evaluator, choices: Choices | None = None) -> Outcome | None:
    """Best outcome with one device a replica, at its own microbatch size and activation policy, or
    at those of ``choices``.

    Returns None if none fits, or if the devices do not divide the batch.
    """
    candidates = evaluator.candidates(_one_device(choices or Choices(pairs=evaluator.dpo)))
    found = search(evaluator, candidates, 1, Budget(SECONDS)).outcomes
    return found[0] if found else None


def _one_device(choices: Choices) -> Choices:
    """``choices`` of one device a replica, with whole samples."""
    return replace(choices, layouts=(WHOLE,), pipeline=(1,), tensor=(1,), context=(1,), fsdp=False)


def add_weight_offload(found: Tuning, evaluator: Evaluator, choices: Choices, keep: int) -> None:
    """Make data parallelism with all frozen weights in host memory the best outcome of ``found`` if
    it is faster than the others and may be chosen.

    ``found.weight_offload`` is that outcome, chosen or not. ``keep`` outcomes remain, and the best
    one without.
    """
    offloading = evaluator.offloading_weights
    if offloading is None:
        return
    outcome = found.weight_offload = data_parallel(offloading)
    best = found.outcomes[0].throughput if found.outcomes else 0.0
    if outcome is None or outcome.throughput <= (1 + ALIKE) * best:
        return
    if not _may_choose(evaluator, choices):
        return
    if _one_device(choices) != _one_device(Choices(pairs=evaluator.dpo)):
        outcome = data_parallel(offloading, choices)
    if outcome is None or outcome.throughput <= (1 + ALIKE) * best:
        return
    whole = Tuning([outcome])
    finish(offloading, whole, 0.0, "none")
    for one in whole.outcomes[:1]:
        config = replace(one.config, offloads_weights=True)
        found.outcomes.insert(0, replace(one, config=config))
        del found.outcomes[max(keep, 2) :]


def _may_choose(evaluator: Evaluator, choices: Choices) -> bool:
    """True if the choices allow one device a replica, and steps have one shape."""
    return (
        (choices.pipeline is None or 1 in choices.pipeline)
        and 1 in choices.tensor
        and 1 in (choices.context or (1,))
        and WHOLE in choices.layouts
        and not evaluator.profile.shapes
    )
