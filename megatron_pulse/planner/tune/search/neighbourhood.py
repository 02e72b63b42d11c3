"""Neighbourhood of a good config: similar configs and moved cuts that may be faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import batched, chain

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.neighbourhood import best_first
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fixed_order_estimate import FixedOrder
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.memory.cap_retry import fit_in
from megatron_pulse.planner.tune.search.candidates import KnownCuts
from megatron_pulse.planner.tune.search.grouping import LayoutKey, layout_key, neighbours
from megatron_pulse.planner.tune.search.result import Tried, keep_soonest
from megatron_pulse.planner.tune.stages import Stages

type Alike = tuple[LayoutKey, int, bool]
"""Degree and layout, microbatch size, and whether the devices have room."""

CLOSE = 1.03
"""Ratio to the best up to which the best of another microbatch size has variants too."""

OVERFULL = 1.2
"""Share of the usable memory up to which moved cuts may make an outcome fit."""

LEAST_SHARE = 0.1
"""Minimum share of variant time for a good config, relative to one as fast as the best."""

MOVED = 1.03
"""Ratio to a step up to which moved cuts, or two changes at once, are tried."""

LOOKS = 24
"""Neighbourhood examined before the caller can check the clock."""

TOGETHER = 48
"""Moved partitions that are ranked together by re-timing."""

STEEP = 4
"""Exponent of the overfull memory ratio in the estimate of partitions that do not fit."""

GAIN, PROMISING = 1e-3, 3
"""Re-timed gain from which moved cuts come before all other variants, and how many do."""


class Neighbourhood:
    """Generator of variants, each once.

    First come partitions of similar configs, then configs with one change and the same cuts.
    Configs with two changes, and moved cuts, follow if their estimates are not much longer. A
    config that was much slower with the same cuts is skipped. Configs that only just do not fit
    have variants too. ``bounds`` are the allowed configs with their lower bounds.
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
        """Allow a config, with its offload and selective recomputation variants."""
        self.bounds[config] = bound
        if config.recompute is Recompute.NEEDED:
            if self.evaluator.offloads_activations:
                self.bounds[replace(config, recompute=Recompute.HOST)] = bound
            if self.evaluator.costs.profile.selects:
                self.bounds[replace(config, recompute=Recompute.SELECTIVE)] = bound

    def add(self, outcome: Outcome) -> None:
        """Record an outcome, which may be the best of its group."""
        if fit_in(outcome.memory_bytes, [OVERFULL * n for n in outcome.stages.usable_bytes]):
            keep_soonest(self._best_of, self._alike(outcome), outcome)

    def widen(self, margin: float) -> None:
        """Multiply the distances up to which configs have variants, and variants are tried."""
        self._margin = margin
        self._left.clear()

    def turns(self, best: Outcome | None, far: float) -> list[Outcome]:
        """Good configs in order of the variant time that they are owed.

        These are the best, the best of every degree and layout below ``far``, and close ones of
        other microbatch sizes. Faster configs that do not fit count too. The best has twice the
        share of one as fast, and slower ones have less.
        """
        ranked = sorted(self._best_of.items(), key=lambda item: item[1].step_s)
        least_s = float("inf") if best is None else best.step_s
        good = {a: (one, 1.0) for a, one in ranked if not a[-1] and one.step_s < least_s}
        if best is not None:
            good[self._alike(best)] = best, 2.0
            far, close = self._wider(far), self._wider(CLOSE)
            kinds = {layout_key(best.config)}
            for alike, other in ranked:
                kind, times = layout_key(other.config), other.step_s / least_s
                if alike[-1] and (times < close or (times < far and kind not in kinds)):
                    share = max(LEAST_SHARE, 1 - (times - 1) / (far - 1))
                    good.setdefault(alike, (other, share))
                    kinds.add(kind)
        ordered = sorted(good, key=lambda alike: self._spent_s[alike] / good[alike][1])
        return [good[alike][0] for alike in ordered]

    def took(self, good: Outcome, seconds: float) -> None:
        """Record seconds spent on variants of ``good``."""
        self._spent_s[self._alike(good)] += seconds

    def compared(self, good: Outcome, other: Config, times: float) -> None:
        """Record that ``other`` with the cuts of ``good`` took ``times`` as long."""
        pair = good.config, other
        self._times[pair] = min(times, self._times.get(pair, times))

    @property
    def spent_s(self) -> float:
        """Seconds spent on variants."""
        return sum(self._spent_s.values())

    def of(self, good: Outcome, limit: float) -> Iterator[tuple[Config, Stages] | None]:
        """New variants of ``good`` that fit and may beat ``limit``.

        None appears after every few variants examined, so that the caller can check the clock.
        """
        key = good.config, good.stages.partition
        known = [(good.config, cuts) for cuts in self.known.of(layout_key(good.config))]
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
                fits = self.evaluator.stages.fits(stages, config.split)
                if fits and not recomputes_nothing(config, stages):
                    yield config, stages

    def _all(self, good: Outcome) -> Iterator[Tried]:
        own, cuts, evaluator = good.config, good.stages.partition, self.evaluator
        farthest = self._wider(MOVED)
        alike = [config for config in neighbours(own) if self._may_have(config, own, cuts)]
        sizes = [c for c in alike if c.micro_batch_size != own.micro_batch_size]
        yield from ((config, cuts) for config in sizes)
        moved = batched(evaluator.partitioner.neighbour_partitions(own, cuts), TOGETHER)
        nearest = self._in_order(good, next(moved, ()))
        promising = [each for each in nearest if nearest[each] < (1 - GAIN) * good.step_s]
        yield from ((own, each) for each in promising[:PROMISING])
        yield from ((config, cuts) for config in alike if config not in sizes)
        most = farthest * evaluator.estimator.cut_estimate(own, good.stages)
        yield from ((config, cuts) for config in self._twice(own, cuts, most))
        for some in chain([nearest], (self._in_order(good, each) for each in moved)):
            yield from ((own, each) for each in some if some[each] < farthest * good.step_s)
        if self._margin > 1:
            ways = [own, *(config for config in alike if config.recompute is not own.recompute)]
            yield from ((config, each) for each in self._best_first(own, cuts) for config in ways)

    def _in_order(self, good: Outcome, moved: Iterable[Partition]) -> dict[Partition, float]:
        """Moved partitions with their re-timed steps, shortest first."""
        played, times = FixedOrder(self.evaluator, good), {}
        for each in moved:
            stages = self.evaluator.stages.build(good.config, each, good.stages.activations)
            times[each] = played.step_s(stages)
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def _best_first(self, config: Config, cuts: Partition) -> Iterator[Partition]:
        """Repeated moves from the best estimate so far, or from the partition that is nearest to
        fitting."""
        evaluator = self.evaluator

        @cache
        def seconds(cuts: Partition) -> float:
            stages = evaluator.cut(config, cuts)
            each = zip(stages.least_held(config.split), stages.usable_bytes, strict=True)
            over = max(1.0, *(held / usable for held, usable in each))
            return over**STEEP * evaluator.estimator.cut_estimate(config, stages)

        least_s, moved = float("inf"), partial(evaluator.partitioner.neighbour_partitions, config)
        for some in batched(best_first(cuts, moved, seconds), TOGETHER):
            times = {each: seconds(each) for each in some}
            least_s = min(least_s, *times.values())
            soonest, *others = sorted(some, key=times.__getitem__)
            yield soonest  # even if far behind: lets the caller check the clock
            yield from (each for each in others if times[each] < self._wider(CLOSE) * least_s)

    def _twice(self, own: Config, cuts: Partition, most: float) -> list[Config]:
        """Configs with two changes whose estimate is below ``most``, best first."""
        found: dict[Config, float] = {}
        once = {own, *neighbours(own)}
        for config in (two for one in once - {own} for two in neighbours(one)):
            if config in once or config in found or not self._may_have(config, own, cuts):
                continue
            with suppress(UnfitError):
                stages = self.evaluator.cut(config, cuts)
                found[config] = self.evaluator.estimator.cut_estimate(config, stages)
        return sorted((c for c in found if found[c] < most), key=found.__getitem__)

    def _may_have(self, config: Config, own: Config, cuts: Partition) -> bool:
        """True if ``config`` may be tried with the cuts of ``own``."""
        stricter = config.layout.collocates and not own.layout.collocates
        return config in self.bounds and config.placement == cuts.placement and not stricter

    def _alike(self, outcome: Outcome) -> Alike:
        has_room = self.evaluator.has_room(outcome)
        return layout_key(outcome.config), outcome.config.micro_batch_size, has_room

    def _wider(self, times: float) -> float:
        return 1 + self._margin * (times - 1)


def recomputes_nothing(config: Config, stages: Stages) -> bool:
    """True if recomputation as needed recomputes nothing, or offload offloads nothing."""
    if config.recompute is Recompute.HOST:
        return not stages.activations.offload
    return config.recompute is Recompute.NEEDED and not stages.activations.recomputes
