"""What a tuner's search takes up: configs, how far each has come, and cuts that are known."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megatron_pulse.planner.layout.layouts import LAYOUTS, Layout
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.stages import Stages

MOST_KNOWN = 4
"""Cuts that are kept for a degree and layout, the latest."""

type Kind = tuple[int, Layout]

type Ranks = tuple[Kind, int, bool]

type Sized = tuple[Ranks, int, bool]


class Reached(IntEnum):
    """How far a config has come (``searching.search`` has the table)."""

    EVEN = 0
    LIKE = 1
    CUT = 2
    QUICK = 3


@dataclass(order=True)
class Candidate:
    """A config in the queue: ``seconds`` is its estimate, or what it may come to by its quick
    schedule, which takes ``reached_s``.

    ``final``: no other schedule of these stages can be shorter, or soon enough to be listed.
    """

    seconds: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    step: Reached = Reached.EVEN
    stages: Stages | None = field(default=None, compare=False)
    reached_s: float = field(default=float("inf"), compare=False)
    final: bool = field(default=False, compare=False)

    @property
    def kind(self) -> Kind:
        """That of its config."""
        return kind_of(self.config)


def kind_of(config: Config) -> Kind:
    """What configs have in common that are cut alike."""
    return config.pipeline, config.layout


def ranks_of(config: Config) -> Ranks:
    """What configs have in common whose ranks are as many in the same places."""
    return kind_of(config), config.tensor, config.pipeline_inside


class KnownCuts:
    """Cuts that others of a kind are tried with, and how much longer a step of them took than their
    load lets expect."""

    def __init__(self) -> None:
        self._cuts: dict[Kind, list[Partition]] = {}
        self._slower: dict[tuple[Kind, Partition], float] = {}

    def of(self, kind: Kind) -> list[Partition]:
        """The latest; none where none was learnt."""
        return self._cuts.get(kind, [])

    def learn(self, kind: Kind, cuts: Partition) -> None:
        """Try others of the kind with these too."""
        known = self.of(kind)
        if cuts not in known:
            self._cuts[kind] = [*known, cuts][-MOST_KNOWN:]

    def took(self, kind: Kind, cuts: Partition, times: float) -> None:
        """A step took so many times what was estimated."""
        self._slower[kind, cuts] = times

    def slower(self, kind: Kind, cuts: Partition) -> float:
        """Times what is estimated that a step takes, as far as is known."""
        return self._slower.get((kind, cuts), 1.0)

    def were_tried(self, kind: Kind) -> bool:
        """Whether a step of any cuts of the kind was simulated."""
        return any(tried == kind for tried, _ in self._slower)


class Queue:
    """Candidates, the soonest first: by their estimates, times the least that others with as many
    ranks in the same places, microbatches as large, and ample memory or not took for theirs.

    Estimates do not see all that a chain of slow messages idles, nor memory for few microbatches,
    for one placement much (twice), for another nothing; once one is simulated the others need not
    be, to know.
    """

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._alike: dict[Sized | None, list[Candidate]] = {}
        self._times: dict[Sized, float] = {}
        self._of_ranks: dict[Ranks, float] = {}
        for candidate in candidates:
            self.push(candidate)

    def __bool__(self) -> bool:
        return bool(self._alike)

    def push(self, candidate: Candidate) -> None:
        """One more."""
        heapq.heappush(self._alike.setdefault(_estimated_with(candidate), []), candidate)

    def pop(self) -> Candidate:
        """The soonest."""
        tops = [(alike[0].seconds * self.times(of), of) for of, alike in self._alike.items()]
        _, sized = min(tops, key=lambda top: top[0])
        alike = self._alike[sized]
        soonest = heapq.heappop(alike)
        if not alike:
            del self._alike[sized]
        return soonest

    def times(self, sized: Sized | None) -> float:
        """Times their estimates that those take; of other sizes half of that (its square root) is
        believed."""
        if sized is None:
            return 1.0
        others = self._of_ranks.get(sized[0], 1.0)
        return self._times.get(sized, float(others**0.5))

    def expected_s(self, candidate: Candidate) -> float:
        """What a candidate is expected to take."""
        return candidate.seconds * self.times(_estimated_with(candidate))

    def took(self, config: Config, times: float) -> None:
        """A config was simulated and took so many times its estimate."""
        sized = ranks, *_ = _sized(config)
        self._times[sized] = min(times, self._times.get(sized, times))
        self._of_ranks[ranks] = min(times, self._of_ranks.get(ranks, times))


def _estimated_with(candidate: Candidate) -> Sized | None:
    """Those whose simulations bear on its estimate; none where it has a quick schedule."""
    return None if candidate.step is Reached.QUICK else _sized(candidate.config)


def _sized(config: Config) -> Sized:
    return ranks_of(config), config.micro_batch_size, config.ample


def by_kind(configs: Iterable[Config]) -> list[list[Config]]:
    """Configs of each degree and layout, the fewest stages first."""
    kinds: dict[Kind, list[Config]] = {}
    for config in configs:
        kinds.setdefault(kind_of(config), []).append(config)
    return sorted(kinds.values(), key=lambda alike: num_stages(alike[0]))


def by_ranks(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Those of each tensor degree and way to share nodes, between which links differ."""
    alike: dict[Ranks, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(ranks_of(candidate.config), []).append(candidate)
    return list(alike.values())


def neighbours(config: Config) -> Iterator[Config]:
    """Those that differ in one thing: microbatches twice or half as large, one way to run, or what
    carries skips."""
    for size in (2 * config.micro_batch_size, config.micro_batch_size // 2):
        yield replace(config, micro_batch_size=size)
    yield replace(config, split=not config.split)
    yield replace(config, ample=not config.ample)
    for recompute in set(Recompute) - {config.recompute}:
        yield replace(config, recompute=recompute)
    yield replace(config, distributed_optimizer=not config.distributed_optimizer)
    yield replace(config, pipeline_inside=not config.pipeline_inside)
    for layout in LAYOUTS.values():
        if layout != config.layout and (layout.kind, layout.num_chunks) == (
            config.layout.kind,
            config.layout.num_chunks,
        ):
            yield replace(config, layout=layout)


def has_several(config: Config) -> bool:
    """Whether each device has several stages, or pairs of stages."""
    return config.layout.num_chunks > (2 if config.placement.kind.mirrored else 1)


def num_stages(config: Config) -> int:
    """Of one pipeline."""
    return config.pipeline * config.layout.num_chunks
