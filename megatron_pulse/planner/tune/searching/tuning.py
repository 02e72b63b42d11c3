"""What a search over configs found: the best, and what became of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Unfit
from megatron_pulse.planner.tune.evaluate import Outcome
from megatron_pulse.planner.tune.sharded.opponent import Opponent

EQUAL = 1 + 1e-9

type Tried = tuple[Config, Partition]
"""A config with these cuts"""

CUTS = 2
"""Times as many outcomes are kept with all their cuts as configs are."""


@dataclass
class Tuning:
    """What a search found: the best outcomes, soonest first, and what became of the others.

    ``bound_s`` is the least that any config could take that was left. ``examples`` has one refusal
    in full for each reason. ``rivals`` are the best of every degree and layout that was simulated,
    by "P=4" or "fold exact", ``simulated`` counts the configs of each that were, and ``degrees``
    refusals by pipeline degree. ``opponent`` is what FSDP2 would come to. ``near`` are the best
    with all their cuts. ``seconds`` do not have in them the ``ready_s`` of compiling. It may have
    been ``stopped`` before its time.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    near: list[Outcome] = field(default_factory=list)
    refused: Counter[Unfit] = field(default_factory=Counter)
    examples: dict[Unfit, str] = field(default_factory=dict)
    rivals: dict[str, Outcome] = field(default_factory=dict)
    simulated: Counter[str] = field(default_factory=Counter)
    degrees: dict[int, Counter[Unfit]] = field(default_factory=dict)
    num_configs: int = 0
    num_simulated: int = 0
    num_left: int = 0
    bound_s: float = float("inf")
    seconds: float = 0.0
    ready_s: float = 0.0
    opponent: Opponent | None = None
    stopped: bool = False

    @property
    def proved(self) -> bool:
        """Whether no config that was left can be better than the best, as simulated."""
        return bool(self.outcomes) and self.bound_s * EQUAL >= self.outcomes[0].step_s


def keep_soonest[K](best: dict[K, Outcome], of: K, outcome: Outcome) -> None:
    """Let ``best`` have the soonest ``of`` each."""
    if of not in best or outcome.step_s < best[of].step_s:
        best[of] = outcome


def tried(outcome: Outcome) -> Tried:
    """Its config and cuts."""
    return outcome.config, outcome.stages.partition


class Shortlist:
    """The best outcomes so far, each way of running once; and ``near``, with all their cuts."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.outcomes: dict[Config, Outcome] = {}
        self.near: list[Outcome] = []
        self.same: set[Config] = set()
        self.best: list[Outcome] = []
        self.limit = float("inf")

    def add(self, outcome: Outcome) -> None:
        """Take it in, or replace what was simulated less thoroughly."""
        near: dict[Tried, Outcome] = {}
        for other in (*self.near, outcome):
            keep_soonest(near, tried(other), other)
        self.near = sorted(near.values(), key=lambda o: o.step_s)[: CUTS * self.keep]
        before = self.outcomes.get(outcome.config)
        if before is not None and before.step_s <= outcome.step_s:
            return
        self.outcomes[outcome.config] = outcome
        ranked = sorted(self.outcomes.values(), key=lambda o: (o.step_s, simplicity(o.config)))
        self.outcomes = {o.config: o for o in ranked[: 8 * self.keep]}
        once: dict[tuple[object, ...], Outcome] = {}
        for other in ranked:
            first = once.setdefault(what_runs(other), other)
            if first is not other:
                self.same.add(other.config)
        self.best = list(once.values())[: self.keep]
        self.limit = self.best[-1].step_s if len(self.best) == self.keep else float("inf")


def what_runs(outcome: Outcome) -> tuple[object, ...]:
    """The same for configs that run the same: ample room that is not used, or a fold whose skips
    stay at home without being made to."""
    config, partition = outcome.config, outcome.stages.partition
    return (
        replace(config, layout=WHOLE, ample=False),
        partition.placement,
        partition.cuts,
        outcome.step_s,
    )


def simplicity(config: Config) -> tuple[int, ...]:
    """Of equals the simpler way of running comes first."""
    extras = (config.recompute, config.split, config.ample, config.distributed_optimizer)
    exact = not config.layout.collocates
    return (*map(int, extras), int(exact), config.pipeline, config.tensor)
