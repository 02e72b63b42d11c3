"""Branch and bound over all configs, the most promising first.

Every config has an estimate and a lower bound that cost nothing (its work, spread evenly). The
config with the least estimate is taken up: first it gets its partition and better figures, then,
when it is the least again, its schedule is simulated. What is bound to take longer than the best
found is dropped.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.stages import Unfit, UnfitError


@dataclass(order=True)
class _Candidate:
    """A config in the queue; ``is_cut`` once its partition is known."""

    estimate: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    is_cut: bool


@dataclass
class Tuning:
    """What a search found: the best outcomes, soonest first, and what became of the others.

    ``bound_s`` is the least that any config could take that was left. ``examples`` has one refusal
    in full for each reason.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    refused: Counter[Unfit] = field(default_factory=Counter)
    examples: dict[Unfit, str] = field(default_factory=dict)
    num_configs: int = 0
    num_simulated: int = 0
    num_left: int = 0
    bound_s: float = float("inf")
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether no config that was left can be better than the best."""
        return bool(self.outcomes) and self.bound_s >= self.outcomes[0].step_s * (1 - 1e-9)


def search(
    evaluator: Evaluator,
    candidates: Iterable[Config],
    keep: int = 10,
    seconds: float = 25.0,
    progress: Callable[[Tuning], None] = lambda _: None,
) -> Tuning:
    """The ``keep`` best of ``candidates``, or of those that were looked at within ``seconds``.

    ``progress`` is called after every step.
    """
    began = time.monotonic()
    found = Tuning()
    queue = _queue(evaluator, candidates, found)
    while queue and (time.monotonic() - began < seconds or not found.outcomes):
        candidate = heapq.heappop(queue)
        if candidate.bound >= _limit(found, keep):
            found.refused[Unfit.SLOWER] += 1
            continue
        config = candidate.config
        try:
            if candidate.is_cut:
                _take(found, evaluator.evaluate(config), keep)
            else:
                bound = max(candidate.bound, evaluator.bound(config))
                estimate = max(bound, evaluator.estimate(config, evaluator.stages(config)))
                cut = _Candidate(estimate, candidate.simplicity, config, bound, True)
                heapq.heappush(queue, cut)
        except UnfitError as error:
            _refuse(found, error)
        found.seconds = time.monotonic() - began
        progress(found)
    left = [c for c in queue if c.bound < _limit(found, keep)]
    found.refused[Unfit.SLOWER] += len(queue) - len(left)
    found.num_left = len(left)
    found.bound_s = min((c.bound for c in left), default=float("inf"))
    found.seconds = time.monotonic() - began
    return found


def _limit(found: Tuning, keep: int) -> float:
    """Steps as long as this are of no interest any more."""
    return found.outcomes[-1].step_s if len(found.outcomes) == keep else float("inf")


def _queue(evaluator: Evaluator, candidates: Iterable[Config], found: Tuning) -> list[_Candidate]:
    queue = []
    for config in candidates:
        found.num_configs += 1
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            _refuse(found, error)
            continue
        bound, estimate = evaluator.quick_bound(config), evaluator.estimate(config)
        queue.append(_Candidate(estimate, _simplicity(config), config, bound, False))
    heapq.heapify(queue)
    return queue


def _simplicity(config: Config) -> tuple[int, ...]:
    """Among equal estimates the simpler way of running first."""
    extras = (config.recompute, config.split, config.ample, config.distributed_optimizer)
    return (*map(int, extras), config.pipeline, config.tensor)


def _take(found: Tuning, outcome: Outcome, keep: int) -> None:
    found.num_simulated += 1
    found.outcomes.append(outcome)
    found.outcomes.sort(key=lambda o: o.step_s)
    del found.outcomes[keep:]


def _refuse(found: Tuning, error: UnfitError) -> None:
    found.refused[error.reason] += 1
    found.examples.setdefault(error.reason, error.detail)
