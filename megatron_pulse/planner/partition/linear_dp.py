"""Optimal cuts with one stage per device: a dynamic program along the chain.

The cost of a stage depends on its layers [begin, end) alone. Skips with one end in the stage travel
directly between its device and that of the other end. Devices may differ: each stage then has
costs and a memory limit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.pair_costs import SLACK, Bools, Ints, PairCosts

type _Tables = list[Floats]
"""Table of [begin, end) for each stage; the same object for stages on devices of one kind."""


def optimal_row(
    devices: Sequence[PairCosts], order: tuple[str, ...], slack: float = 0.0
) -> tuple[int, ...] | None:
    """Cuts into one stage for each of ``devices``, smallest by the measures of ``order``.

    The most important measure comes first. A measure may exceed its smallest value by the share
    ``slack`` if a later measure gains. Returns None if no cuts fit the devices' memory.
    """
    num = len(devices[0].costs.names)
    begin, end = np.triu_indices(num + 1, 1)

    def tables_of(measure: str) -> _Tables:
        known = {
            id(pairs): _table(num, begin, end, pairs.row(measure, begin, end)) for pairs in devices
        }
        return [known[id(pairs)] for pairs in devices]

    tables = {name: tables_of(name) for name in order}
    allowed = []
    for stage, pairs in enumerate(devices):
        limit = pairs.memory.limit_bytes * SLACK if pairs.memory is not None else np.inf
        held = _table(num, begin, end, pairs.row_bytes_held(stage, begin, end))
        allowed.append(held <= limit)
    cuts = None
    moved: tuple[_Tables, float] | None = None
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
            allowed = [
                stage & (table <= most)
                for stage, table in zip(allowed, tables[measure], strict=True)
            ]
    return cuts


def _table(num: int, begin: Ints, end: Ints, values: Floats) -> Floats:
    table = np.full((num + 1, num + 1), np.inf)
    table[begin, end] = values
    return table


def _smallest(
    tables: _Tables, allowed: list[Bools], moved: tuple[_Tables, float] | None
) -> tuple[float, tuple[int, ...]] | None:
    """Cuts with the smallest largest stage, within the byte limit of ``moved``.

    The fewest bytes fall as the bound on the stages rises. Bisection finds the lowest bound at
    which the bytes are within their limit.
    """
    if moved is None:
        return _search(tables, allowed, add=False)
    amounts, most = moved
    every = {id(table): table for table in tables}.values()
    bounds = np.unique(np.concatenate([table[np.isfinite(table)] for table in every]))
    best, low, high = None, 0, len(bounds) - 1
    while low <= high:
        middle = (low + high) // 2
        within = [
            stage & (table <= bounds[middle]) for stage, table in zip(allowed, tables, strict=True)
        ]
        found = _fewest(amounts, within)
        if found is not None and found[0] <= most:
            best, high = (float(bounds[middle]), found[1]), middle - 1
        else:
            low = middle + 1
    return best


def _fewest(tables: _Tables, allowed: list[Bools]) -> tuple[float, tuple[int, ...]] | None:
    """Cuts with the smallest sum over stages."""
    return _search(tables, allowed, add=True)


def _search(
    tables: _Tables, allowed: list[Bools], add: bool
) -> tuple[float, tuple[int, ...]] | None:
    """Smallest maximum (with ``add``: smallest sum) over allowed stages, and its cuts."""
    num = len(tables[0]) - 1
    value = np.full(num + 1, np.inf)
    value[0] = 0.0
    choices = []
    for table, stage in zip(tables, allowed, strict=True):
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
