"""Local search over cuts: one or several cuts move while the ranking improves.

Cuts between the chains of a cascade stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from megatron_pulse.planner.partition.pair_costs import SLACK, Ints

_FAR = 2
"""Most layers by which two cuts move at once; a single cut moves anywhere."""


_SHAKEN, _SHARE = 8, 0.3
"""Number of random perturbations per restart, and share of cuts that each moves."""


@dataclass
class Ranking:
    """Order of cuts: violated constraints first, then the measures of ``order``.

    A measure below its cap in ``caps`` counts as the cap.
    """

    many: BatchedEvaluator
    order: tuple[str, ...]
    collocate: bool
    caps: dict[str, float] = field(default_factory=dict)

    def value(self, measure: str, cuts: Ints) -> float:
        """Value of ``measure`` for one row of cuts."""
        return float(getattr(self.many.measure(cuts[None, :]), measure)[0])

    @staticmethod
    def allows(score: tuple[float, ...]) -> bool:
        """True if the memory suffices and, where required, no skip travels."""
        return score[:2] == (0.0, 0.0)

    def columns(self, cuts: Ints) -> Floats:
        """Sort keys of every row of ``cuts``, most important first; less is better.

        Values are rounded, so that numerical noise does not count as progress.
        """
        found = self.many.measure(cuts)
        rule = self.many.memory
        limit = rule.limit_bytes * SLACK if rule is not None else np.inf
        columns = [
            found.apart.astype(np.float64) if self.collocate else np.zeros(len(cuts)),
            np.maximum(found.memory - limit, 0.0),
        ]
        for measure in self.order:
            columns.append(np.maximum(getattr(found, measure), self.caps.get(measure, 0.0)))
        columns += [getattr(found, measure) for measure in self.order]
        return _rounded(np.stack(columns, axis=1))

    def best(self, cuts: Ints) -> tuple[tuple[float, ...], Ints]:
        """Best row of ``cuts`` with its sort keys."""
        columns = self.columns(cuts)
        at = np.lexsort(columns.T[::-1])[0]
        return tuple(columns[at].tolist()), cuts[at]


def steepest_descent(
    ranking: Ranking, cuts: Ints, work: int, far: int = _FAR
) -> tuple[tuple[float, ...], Ints, int]:
    """Steepest descent from ``cuts`` with about ``work`` candidates; also return the unused work.

    Two cuts move by up to ``far`` layers at once.
    """
    score, best = ranking.best(cuts[None, :])
    while work > 0:
        candidates = neighbours(best, far)
        if pinned := list(ranking.many.placement.starts[1:]):
            candidates = candidates[(candidates[:, pinned] == best[pinned]).all(axis=1)]
        work -= len(candidates)
        if not len(candidates):
            break
        found, moved = ranking.best(candidates)
        if found >= score:
            break
        score, best = found, moved
    return score, best, max(0, work)


def iterated_local_search(
    ranking: Ranking, cuts: Ints, work: int
) -> tuple[tuple[float, ...], Ints]:
    """Iterated local search: perturb ``cuts`` at random and descend again, while ``work`` lasts."""
    rng = np.random.default_rng(0)
    score, best = ranking.best(cuts[None, :])
    while work > 0:
        work -= _SHAKEN
        steps = rng.integers(-_FAR, _FAR + 1, (_SHAKEN, len(best)))
        steps[rng.random(steps.shape) > _SHARE] = 0
        steps[:, [*ranking.many.placement.starts, -1]] = 0
        starts = best + steps
        starts = starts[(np.diff(starts, axis=1) > 0).all(axis=1)]
        if not len(starts):
            continue
        start = ranking.best(starts)[1]
        found, moved, work = steepest_descent(ranking, start, work, far=1)
        if found < score:
            score, best = found, moved
    return score, best


def neighbours(cuts: Ints, far: int = _FAR) -> Ints:
    """Rows in which one cut moves anywhere, two move a little, or a run of cuts moves together."""
    num = len(cuts) - 2
    width = int(np.diff(cuts).max())
    moved = cuts + np.concatenate([_alone(num, width), _together(num, far)])
    result: Ints = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
    return result


@lru_cache
def _alone(num: int, width: int) -> Ints:
    """Moves of one of ``num`` cuts by up to ``width`` layers either way, as rows of offsets."""
    far = np.array([d for d in range(-width, width + 1) if d])
    rows: Ints = np.zeros((num, len(far), num + 2), dtype=np.int64)
    rows[np.arange(num), :, np.arange(num) + 1] = far
    return rows.reshape(-1, num + 2)


@lru_cache
def _together(num: int, far: int) -> Ints:
    """Offsets of two cuts by up to ``far`` layers each, or of a run of cuts by the same number."""
    steps = np.array([d for d in range(-far, far + 1) if d])
    pairs = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    shifts: list[Ints] = [np.zeros((0, num + 2), dtype=np.int64)]
    for first in range(1, num + 1):
        for last in range(first + 1, num + 1):
            two: Ints = np.zeros((len(pairs), num + 2), dtype=np.int64)
            two[:, [first, last]] = pairs
            shifts.append(two)
            if last > first + 1:
                run: Ints = np.zeros((len(steps), num + 2), dtype=np.int64)
                run[:, first : last + 1] = steps[:, None]
                shifts.append(run)
    return np.concatenate(shifts)


def _rounded(values: Floats) -> Floats:
    """Round to ten significant digits."""
    with np.errstate(divide="ignore"):
        digits = np.where(values > 0, np.floor(np.log10(np.maximum(values, 1e-300))), 0.0)
    unit = 10.0 ** (digits - 9)
    result: Floats = np.round(values / unit) * unit
    return result
