"""What differs little from a good config of a tuner's search, and may be sooner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import batched, chain

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.moves import farther
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.costs import UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.in_order import InOrder
from megatron_pulse.planner.tune.searching.candidates import KnownCuts
from megatron_pulse.planner.tune.searching.kinds import Kind, kind_of, neighbours
from megatron_pulse.planner.tune.searching.tuning import Tried, keep_soonest
from megatron_pulse.planner.tune.stages import Stages

type Alike = tuple[Kind, int, bool]
"""Degree and layout, size of microbatches, and whether devices have room"""

CLOSE = 1.03
"""Times the best, up to which the best with microbatches of another size has variants too."""

OVERFULL = 1.2
"""Times what a device may use, up to which moved cuts may have room."""

LEAST_SHARE = 0.1
"""Of the time that variants have of what takes as long as the best, what all good ones' have."""

MOVED = 1.03
"""Times a step, up to which it is a variant with its cuts moved, or what differs in two things."""

LOOKS = 24
"""Variants that are looked at, and may all be ruled out, before whoever asks is told so."""

TOGETHER = 48
"""Moved cuts of which the one is simulated first that is the soonest in the same order."""

STEEP = 4
"""Power of what a device would hold, as a share of what it may, times which cuts without room are
estimated as a way to others."""

GAIN, PROMISING = 1e-3, 3
"""What moved cuts gain in the same order that come before all other variants, and how many do."""


class Variants:
    """The config with cuts that were good for others of its kind; what differs from it in one thing
    and has its cuts, which need not be its own; then what differs in two, and the config with a cut
    moved, or two, where that is not estimated much longer. Each comes once.

    What took much longer than the config with other cuts is not tried with these. Of what devices
    have only just no room for, variants may have some.
    ``bounds`` are the configs that may be tried, and what a step of each takes at the least.
    """

    def __init__(self, evaluator: Evaluator, known: KnownCuts) -> None:
        self.evaluator, self.known = evaluator, known
        self.bounds: dict[Config, float] = {}
        self._best_of: dict[Alike, Outcome] = {}
        self._margin = 1.0
        self._spent_s: defaultdict[Alike, float] = defaultdict(float)
        self._times: dict[tuple[Config, Config], float] = {}
        self._left: dict[Tried, Iterator[Tried]] = {}
        self._seen: set[Tried] = set()

    def may_be(self, config: Config, bound: float) -> None:
        """The config may be tried; and so may, where some may be computed again if need be, what
        has activations on the host, and what computes all again that is cheap."""
        self.bounds[config] = bound
        if config.recompute is Recompute.NEEDED:
            if self.evaluator.cluster.host is not None:
                self.bounds[replace(config, recompute=Recompute.HOST)] = bound
            if self.evaluator.profile.selects:
                self.bounds[replace(config, recompute=Recompute.SELECTIVE)] = bound

    def add(self, outcome: Outcome) -> None:
        """What was simulated may be the best of its kind and size."""
        if max(outcome.memory_bytes) <= OVERFULL * self.evaluator.cluster.usable_bytes:
            keep_soonest(self._best_of, self._alike(outcome), outcome)

    def widen(self, margin: float) -> None:
        """From now on what is so many times as far from the best has variants, and these may be as
        much farther from it."""
        self._margin = margin
        self._left.clear()

    def turns(self, best: Outcome | None, far: float) -> list[Outcome]:
        """The best, the best of every kind that takes less than ``far`` times as long, of every
        size of microbatches that takes about as long, and what would be sooner but has no room;
        first what variants of its kind and size had the least time so far for its share: the best
        has twice that of what takes as long, and that the less the longer it takes."""
        ranked = sorted(self._best_of.items(), key=lambda item: item[1].step_s)
        least_s = float("inf") if best is None else best.step_s
        good = {a: (one, 1.0) for a, one in ranked if not a[-1] and one.step_s < least_s}
        if best is not None:
            good[self._alike(best)] = best, 2.0
            far, close = self._wider(far), self._wider(CLOSE)
            kinds = {kind_of(best.config)}
            for alike, other in ranked:
                kind, times = kind_of(other.config), other.step_s / least_s
                if alike[-1] and (times < close or (times < far and kind not in kinds)):
                    share = max(LEAST_SHARE, 1 - (times - 1) / (far - 1))
                    good.setdefault(alike, (other, share))
                    kinds.add(kind)
        in_turn = sorted(good, key=lambda alike: self._spent_s[alike] / good[alike][1])
        return [good[alike][0] for alike in in_turn]

    def took(self, good: Outcome, seconds: float) -> None:
        """Variants of ``good`` had so much more time."""
        self._spent_s[self._alike(good)] += seconds

    def compared(self, good: Outcome, other: Config, times: float) -> None:
        """A step of ``other`` with the cuts of ``good`` took so many times as long."""
        pair = good.config, other
        self._times[pair] = min(times, self._times.get(pair, times))

    @property
    def spent_s(self) -> float:
        """Seconds that all variants had."""
        return sum(self._spent_s.values())

    def of(self, good: Outcome, limit: float) -> Iterator[tuple[Config, Stages] | None]:
        """Those of ``good`` that were not seen, fit, and may be sooner than ``limit``; None in
        the place of every so many that are not: there may be no end to them, so look at the clock.
        """
        key = good.config, good.stages.partition
        known = [(good.config, cuts) for cuts in self.known.of(kind_of(good.config))]
        every = chain(known, self._left.setdefault(key, self._all(good)))
        for number, (config, cuts) in enumerate(every, 1):
            if number % LOOKS == 0:
                yield None
            if (config, cuts) in self._seen or self.bounds[config] >= limit:
                continue
            if self._times.get((good.config, config), 1.0) > self._wider(MOVED):
                continue
            self._seen.add((config, cuts))
            with suppress(UnfitError):
                stages = self.evaluator.cut(config, cuts)
                fits = self.evaluator.fits(stages, config.split)
                if fits and not recomputes_nothing(config, stages):
                    yield config, stages

    def _all(self, good: Outcome) -> Iterator[Tried]:
        own, cuts, evaluator = good.config, good.stages.partition, self.evaluator
        farthest = self._wider(MOVED)
        alike = [config for config in neighbours(own) if self._may_have(config, own, cuts)]
        sizes = [c for c in alike if c.micro_batch_size != own.micro_batch_size]
        yield from ((config, cuts) for config in sizes)
        moved = batched(evaluator.moved_cuts(own, cuts), TOGETHER)
        nearest = self._in_order(good, next(moved, ()))
        promising = [each for each in nearest if nearest[each] < (1 - GAIN) * good.step_s]
        yield from ((own, each) for each in promising[:PROMISING])
        yield from ((config, cuts) for config in alike if config not in sizes)
        most = farthest * evaluator.cut_estimate(own, good.stages)
        yield from ((config, cuts) for config in self._twice(own, cuts, most))
        for some in chain([nearest], (self._in_order(good, each) for each in moved)):
            yield from ((own, each) for each in some if some[each] < farthest * good.step_s)
        if self._margin > 1:
            ways = [own, *(config for config in alike if config.recompute is not own.recompute)]
            yield from ((config, each) for each in self._farther(own, cuts) for config in ways)

    def _in_order(self, good: Outcome, moved: Iterable[Partition]) -> dict[Partition, float]:
        """What a step of these cuts takes in the order of the good one's, where the same layers are
        computed again or on the host; the soonest first."""
        played, times = InOrder(self.evaluator, good), {}
        for each in moved:
            stages = self.evaluator.cut_with(good.config, each, good.stages.relief)
            times[each] = played.step_s(stages)
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def _farther(self, config: Config, cuts: Partition) -> Iterator[Partition]:
        """Moves upon moves: always of what is estimated to be the soonest so far, or nearest to it
        that has no room; of some together the soonest first, and what is close to it."""
        evaluator, usable = self.evaluator, self.evaluator.cluster.usable_bytes

        @cache
        def seconds(cuts: Partition) -> float:
            stages = evaluator.cut(config, cuts)
            over = max(1.0, max(stages.least_held(config.split)) / usable)
            return over**STEEP * evaluator.cut_estimate(config, stages)

        least_s, moved = float("inf"), partial(evaluator.moved_cuts, config)
        for some in batched(farther(cuts, moved, seconds), TOGETHER):
            times = {each: seconds(each) for each in some}
            least_s = min(least_s, *times.values())
            soonest, *others = sorted(some, key=times.__getitem__)
            yield soonest  # of each, though it be far behind: whoever asks looks at the clock
            yield from (each for each in others if times[each] < self._wider(CLOSE) * least_s)

    def _twice(self, own: Config, cuts: Partition, most: float) -> list[Config]:
        """What differs in two things and may have these cuts, where it is estimated to take less
        than ``most``, the soonest first."""
        found: dict[Config, float] = {}
        once = {own, *neighbours(own)}
        for config in (two for one in once - {own} for two in neighbours(one)):
            if config in once or config in found or not self._may_have(config, own, cuts):
                continue
            with suppress(UnfitError):
                stages = self.evaluator.cut(config, cuts)
                found[config] = self.evaluator.cut_estimate(config, stages)
        return sorted((c for c in found if found[c] < most), key=found.__getitem__)

    def _may_have(self, config: Config, own: Config, cuts: Partition) -> bool:
        """Whether ``config`` may be tried with the cuts of ``own``."""
        stricter = config.layout.collocates and not own.layout.collocates
        return config in self.bounds and config.placement == cuts.placement and not stricter

    def _alike(self, outcome: Outcome) -> Alike:
        has_room = self.evaluator.has_room(outcome)
        return kind_of(outcome.config), outcome.config.micro_batch_size, has_room

    def _wider(self, times: float) -> float:
        return 1 + self._margin * (times - 1)


def recomputes_nothing(config: Config, stages: Stages) -> bool:
    """Whether as little recomputation as is needed is none, or nothing is on the host."""
    if config.recompute is Recompute.HOST:
        return not stages.offload
    return config.recompute is Recompute.NEEDED and not stages.relief.computes
