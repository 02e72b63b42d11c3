"""Whether a part of a cluster would train faster than all of it: over slow links it can."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.search import search

SECONDS = 2.0
"""What looking at one part may take."""


@dataclass(frozen=True)
class Fewer:
    """What some of a cluster's devices would come to."""

    num_devices: int
    outcome: Outcome

    def beside(self, throughput: float) -> str:
        """In words, beside what all come to."""
        alone = "one device alone is" if self.num_devices == 1 else f"{self.num_devices} are"
        more = self.outcome.throughput / throughput - 1
        return (
            f"{alone} predicted at {self.outcome.throughput:.4g} samples/s, {more:.0%} more than "
            f"all together: {self.outcome.config}"
        )


def fewer_devices(evaluator: Evaluator, best: Outcome, choices: Choices) -> Fewer | None:
    """The fastest of one device and one node, where that is faster than ``best`` of all.

    Nothing is searched where devices that never wait would not be.
    """
    cluster, found = evaluator.cluster, []
    for count in sorted({1, cluster.devices_per_node} - {cluster.num_devices}):
        part = cluster.part(count)
        if part is None or count * ideal_rate(evaluator) <= best.throughput:
            continue
        alone = evaluator.on(part)
        tuned = search(alone, alone.candidates(choices), 1, Budget(SECONDS))
        found += [Fewer(count, outcome) for outcome in tuned.outcomes]
    fastest = max(found, key=lambda each: each.outcome.throughput, default=None)
    if fastest is None or fastest.outcome.throughput <= best.throughput:
        return None
    return fastest


def ideal_rate(evaluator: Evaluator) -> float:
    """Samples/s of a device that never waits, at the best of the profiled microbatch sizes."""
    profile = evaluator.profile
    return max(
        size / sum(layer.whole_s for layer in profile.times_at(size))
        for size in profile.micro_batch_sizes
    )
