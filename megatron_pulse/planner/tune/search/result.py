"""Search result: the best outcomes, and what became of the other configs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Outcome
from megatron_pulse.planner.tune.fsdp.baseline import FsdpBaseline
from megatron_pulse.planner.tune.layer_costs import Unfit

EQUAL = 1 + 1e-9

type Tried = tuple[Config, Partition]
"""Config with a partition."""

CUTS = 2
"""Outcomes kept with all their partitions, per config kept."""


@dataclass
class Tuning:
    """Search result: the best outcomes, best first, and what became of the other configs.

    ``bound_s`` is a lower bound on the step time of all unexplored configs. ``examples`` has one
    full refusal per reason. ``rivals`` are the best of every degree and layout simulated, by "P=4"
    or "fold exact"; ``simulated`` counts the configs of each. ``degrees`` counts refusals by
    pipeline degree. ``fsdp_baseline`` is the FSDP2 baseline, or ``not_sharded`` says why there is
    none. ``weight_offload`` is the best data parallelism with frozen weights in host memory.
    ``near`` are the best outcomes with
    all their partitions. ``seconds`` exclude the ``ready_s`` of compilation. ``stopped`` tells that
    the search was ended early.
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
    fsdp_baseline: FsdpBaseline | None = None
    not_sharded: str = ""
    weight_offload: Outcome | None = None
    stopped: bool = False

    @property
    def proved(self) -> bool:
        """True if no unexplored config can beat the best, as simulated."""
        return bool(self.outcomes) and self.bound_s * EQUAL >= self.outcomes[0].step_s


def keep_soonest[K](best: dict[K, Outcome], of: K, outcome: Outcome) -> None:
    """Keep the shortest outcome per key."""
    if of not in best or outcome.step_s < best[of].step_s:
        best[of] = outcome


def tried(outcome: Outcome) -> Tried:
    """Config and partition of an outcome."""
    return outcome.config, outcome.stages.partition


class Shortlist:
    """Best outcomes so far, without equivalent configs; ``near`` has all their partitions."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.outcomes: dict[Config, Outcome] = {}
        self.near: list[Outcome] = []
        self.same: set[Config] = set()
        self.best: list[Outcome] = []
        self.limit = float("inf")

    def add(self, outcome: Outcome) -> None:
        """Insert an outcome, or replace a less thorough simulation."""
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
            first = once.setdefault(execution_key(other), other)
            if first is not other:
                self.same.add(other.config)
        self.best = list(once.values())[: self.keep]
        self.limit = self.best[-1].step_s if len(self.best) == self.keep else float("inf")


def execution_key(outcome: Outcome) -> tuple[object, ...]:
    """Key that is equal for configs that run the same way.

    Examples: max_in_flight memory that is not used, or a fold whose skips are collocated without
    being made to.
    """
    config, partition = outcome.config, outcome.stages.partition
    return (
        replace(config, layout=WHOLE, max_in_flight=False),
        partition.placement,
        partition.cuts,
        outcome.step_s,
    )


def simplicity(config: Config) -> tuple[int, ...]:
    """Sort key that prefers the simpler of equal configs."""
    extras = (config.recompute, config.split, config.max_in_flight, config.distributed_optimizer)
    exact = not config.layout.collocates
    degrees = config.pipeline, config.tensor, config.context
    return (*map(int, extras), int(exact), *degrees)


def merged(one: Tuning, other: Tuning, keep: int) -> Tuning:
    """Result of two searches over different configs, with the ``keep`` best."""
    listed = Shortlist(keep)
    for outcome in (*one.near, *other.near, *one.outcomes, *other.outcomes):
        listed.add(outcome)
    rivals = dict(one.rivals)
    for name, rival in other.rivals.items():
        keep_soonest(rivals, name, rival)
    degrees = dict(one.degrees)
    for degree, counts in other.degrees.items():
        degrees[degree] = degrees[degree] + counts if degree in degrees else counts
    return Tuning(
        outcomes=listed.best,
        near=listed.near,
        refused=one.refused + other.refused,
        examples={**other.examples, **one.examples},
        rivals=rivals,
        simulated=one.simulated + other.simulated,
        degrees=degrees,
        num_configs=one.num_configs + other.num_configs,
        num_simulated=one.num_simulated + other.num_simulated,
        num_left=one.num_left + other.num_left,
        bound_s=min(one.bound_s, other.bound_s),
        seconds=one.seconds + other.seconds,
        ready_s=one.ready_s + other.ready_s,
        fsdp_baseline=one.fsdp_baseline or other.fsdp_baseline,
        not_sharded=one.not_sharded or other.not_sharded,
        weight_offload=one.weight_offload or other.weight_offload,
        stopped=one.stopped or other.stopped,
    )
