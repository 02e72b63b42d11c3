"""The optimal cuts where every device has one stage: a dynamic program along the chain.

A stage is the layers [begin, end); what it costs depends on nothing else: skips with one end in
it travel, directly, between its device and that of their other end.
"""

from __future__ import annotations

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.pair_costs import SLACK, Bools, Ints, PairCosts


def optimal_row(
    pairs: PairCosts, num_stages: int, order: tuple[str, ...], slack: float = 0.0
) -> tuple[int, ...] | None:
    """Cuts into ``num_stages`` that are smallest by the measures of ``order``, the first first.

    A measure may be larger than its smallest value by the share ``slack`` where a later one gains.

    None if no cuts fit the devices' memory.
    """
    num = len(pairs.costs.names)
    begin, end = np.triu_indices(num + 1, 1)
    tables = {name: _table(num, begin, end, pairs.row(name, begin, end)) for name in order}
    held = [_table(num, begin, end, pairs.row_bytes_held(s, begin, end)) for s in range(num_stages)]
    limit = pairs.memory.limit_bytes * SLACK if pairs.memory is not None else np.inf
    allowed = [table <= limit for table in held]
    cuts = None
    for measure in order:
        found = _search(tables[measure], allowed, num_stages, measure == "bytes")
        if found is None:
            return None
        value, cuts = found
        if measure != "bytes":
            allowed = [
                stage & (tables[measure] <= value * (1 + slack) * SLACK) for stage in allowed
            ]
    return cuts


def _table(num: int, begin: Ints, end: Ints, values: Floats) -> Floats:
    table = np.full((num + 1, num + 1), np.inf)
    table[begin, end] = values
    return table


def _search(
    table: Floats, allowed: list[Bools], num_stages: int, add: bool
) -> tuple[float, tuple[int, ...]] | None:
    num = len(table) - 1
    value = np.full(num + 1, np.inf)
    value[0] = 0.0
    choices = []
    for stage in range(num_stages):
        cost = np.where(allowed[stage], table, np.inf)
        total = value[:, None] + cost if add else np.maximum(value[:, None], cost)
        choices.append(total.argmin(axis=0))
        value = total.min(axis=0)
    if not np.isfinite(value[num]):
        return None
    cuts = [num]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(value[num]), tuple(reversed(cuts))
