"""Scale-down advice: over slow links part of a cluster can train faster than all of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.search import search

SECONDS = 2.0
"""Seconds of search per part of the cluster."""


@dataclass(frozen=True)
class ScaleDown:
    """Predicted outcome on some of a cluster's devices."""

    num_devices: int
    outcome: Outcome

    def beside(self, throughput: float) -> str:
        """Sentence that compares the outcome with ``throughput`` samples/s of the whole cluster."""
        alone = "one device is" if self.num_devices == 1 else f"{self.num_devices} devices are"
        more = self.outcome.throughput / throughput - 1
        return (
            f"{alone} predicted at {self.outcome.throughput:.4g} samples/s, {more:.0%} more than "
            f"the whole cluster: {self.outcome.config}"
        )


def scale_down(evaluator: Evaluator, best: Outcome, choices: Choices) -> ScaleDown | None:
    """Best outcome on one device or one node, if it beats ``best`` of the whole cluster.

    A part is skipped if even devices that never wait would not beat ``best``.
    """
    cluster, found = evaluator.cluster, []
    for count in sorted({1, cluster.devices_per_node} - {cluster.num_devices}):
        part = cluster.part(count)
        if part is None or count * ideal_rate(evaluator) <= best.throughput:
            continue
        alone = evaluator.on(part)
        tuned = search(alone, alone.candidates(choices), 1, Budget(SECONDS))
        found += [ScaleDown(count, outcome) for outcome in tuned.outcomes]
    fastest = max(found, key=lambda each: each.outcome.throughput, default=None)
    if fastest is None or fastest.outcome.throughput <= best.throughput:
        return None
    return fastest


def ideal_rate(evaluator: Evaluator) -> float:
    """Samples/s of one device that never waits, at the best profiled microbatch size."""
    profile = evaluator.profile
    return max(
        size / sum(layer.whole_s for layer in profile.times_at(size))
        for size in profile.micro_batch_sizes
    )
