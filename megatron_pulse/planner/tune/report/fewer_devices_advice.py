"""Scale-down advice: over slow links part of a cluster can train faster than all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.search import search

SECONDS = 2.0
"""Seconds of search per part of the cluster."""


@dataclass(frozen=True)
class ScaleDown:
    """Predicted outcome on some of a cluster's devices, of one ``kind`` if they differ."""

    num_devices: int
    outcome: Outcome
    kind: str = ""

    @property
    def part(self) -> str:
        """Text that names the devices."""
        if self.kind:
            return f"the {self.num_devices} {self.kind}"
        return "one device" if self.num_devices == 1 else f"{self.num_devices} devices"

    def beside(self, throughput: float) -> str:
        """Sentence that compares the outcome with ``throughput`` samples/s of the whole cluster."""
        alone = f"{self.part} {'is' if self.num_devices == 1 else 'are'}"
        more = self.outcome.throughput / throughput - 1
        return (
            f"{alone} predicted at {self.outcome.throughput:.4g} samples/s, {more:.0%} more than "
            f"the whole cluster: {self.outcome.config}"
        )


def scale_down(evaluator: Evaluator, best: Outcome, choices: Choices) -> ScaleDown | None:
    """Best outcome on one device or one node, if it beats ``best`` of the whole cluster.

    On unlike devices, the parts are the devices of each kind.

    A part is skipped if even devices that never wait would not beat ``best``.
    """
    found: list[ScaleDown] = []
    for kind, alone in _parts(evaluator):
        count = alone.cluster.num_devices
        if count * ideal_rate(alone) <= best.throughput:
            continue
        tuned = search(alone, alone.candidates(choices), 1, Budget(SECONDS))
        found += [ScaleDown(count, outcome, kind) for outcome in tuned.outcomes]
    fastest = max(found, key=lambda each: each.outcome.throughput, default=None)
    if fastest is None or fastest.outcome.throughput <= best.throughput:
        return None
    return fastest


def _parts(evaluator: Evaluator) -> Iterator[tuple[str, Evaluator]]:
    """Yield evaluators on parts of the cluster, with the name of their kind if devices differ."""
    cluster, profile = evaluator.cluster, evaluator.profile
    if not cluster.mixed:
        for count in sorted({1, cluster.devices_per_node} - {cluster.num_devices}):
            if (part := cluster.part(count)) is not None:
                yield "", evaluator.on(part)
        return
    for kind in cluster.kinds:
        own = profile.of_kind(kind.name) if profile.kinds else profile
        yield kind.name, evaluator.on(cluster.only(kind.name), profile=own)


def ideal_rate(evaluator: Evaluator) -> float:
    """Samples/s of one device that never waits, at the best profiled microbatch size."""
    profile = evaluator.profile
    return max(
        size / sum(layer.whole_s for layer in profile.times_at(size))
        for size in profile.micro_batch_sizes
    )
