"""Data parallelism on the same cluster: a baseline that a plan has to beat."""

from __future__ import annotations

from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.search import search

SECONDS = 2.0
"""Seconds of search."""


def data_parallel(evaluator: Evaluator) -> Outcome | None:
    """Best outcome with one device a replica, at its own microbatch size and activation policy.

    Returns None if none fits, or if the devices do not divide the batch.
    """
    choices = Choices(layouts=(WHOLE,), pipeline=(1,), tensor=(1,), pairs=evaluator.dpo)
    configs = evaluator.candidates(choices)
    found = search(evaluator, configs, 1, Budget(SECONDS)).outcomes
    return found[0] if found else None
