"""Optimal cuts with one stage per device: a dynamic program along the chain.

The cost of a stage depends on its layers [begin, end) alone. Skips with one end in the stage travel
directly between its device and that of the other end.
"""

from __future__ import annotations

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.pair_costs import SLACK, Bools, Ints, PairCosts


def optimal_row(
    pairs: PairCosts, num_stages: int, order: tuple[str, ...], slack: float = 0.0
) -> tuple[int, ...] | None:
    """Cuts into ``num_stages`` that are smallest by the measures of ``order``, most important
    first.

    A measure may exceed its smallest value by the share ``slack`` if a later measure gains. Returns
    None if no cuts fit the devices' memory.
    """
    num = len(pairs.costs.names)
    begin, end = np.triu_indices(num + 1, 1)
    tables = {name: _table(num, begin, end, pairs.row(name, begin, end)) for name in order}
    held = [_table(num, begin, end, pairs.row_bytes_held(s, begin, end)) for s in range(num_stages)]
    limit = pairs.memory.limit_bytes * SLACK if pairs.memory is not None else np.inf
    allowed = [table <= limit for table in held]
    cuts = None
    moved: tuple[Floats, float] | None = None
    for measure in order:
        if measure == "bytes":
            found = _fewest(tables[measure], allowed)
        else:
            found = _smallest(tables[measure], allowed, moved)
        if found is None:
            return None
        value, cuts = found
        most = value * (1 + slack) * SLACK
        if measure == "bytes":
            moved = tables[measure], most
        else:
            allowed = [stage & (tables[measure] <= most) for stage in allowed]
    return cuts


def _table(num: int, begin: Ints, end: Ints, values: Floats) -> Floats:
    table = np.full((num + 1, num + 1), np.inf)
    table[begin, end] = values
    return table


def _smallest(
    table: Floats, allowed: list[Bools], moved: tuple[Floats, float] | None
) -> tuple[float, tuple[int, ...]] | None:
    """Cuts with the smallest largest stage, within the byte limit of ``moved``.

    The fewest bytes fall as the bound on the stages rises. Bisection finds the lowest bound at
    which the bytes are within their limit.
    """
    if moved is None:
        return _search(table, allowed, add=False)
    amounts, most = moved
    bounds = np.unique(table[np.isfinite(table)])
    best, low, high = None, 0, len(bounds) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _fewest(amounts, [stage & (table <= bounds[middle]) for stage in allowed])
        if found is not None and found[0] <= most:
            best, high = (float(bounds[middle]), found[1]), middle - 1
        else:
            low = middle + 1
    return best


def _fewest(table: Floats, allowed: list[Bools]) -> tuple[float, tuple[int, ...]] | None:
    """Cuts with the smallest sum over stages."""
    return _search(table, allowed, add=True)


def _search(table: Floats, allowed: list[Bools], add: bool) -> tuple[float, tuple[int, ...]] | None:
    """Smallest maximum (with ``add``: smallest sum) over allowed stages, and its cuts."""
    num = len(table) - 1
    value = np.full(num + 1, np.inf)
    value[0] = 0.0
    choices = []
    for stage in allowed:
        cost = np.where(stage, table, np.inf)
        total = value[:, None] + cost if add else np.maximum(value[:, None], cost)
        choices.append(total.argmin(axis=0))
        value = total.min(axis=0)
    if not np.isfinite(value[num]):
        return None
    cuts = [num]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(value[num]), tuple(reversed(cuts))
