"""Collectives that Megatron-Core issues in a step: kinds, bytes and numbers.

Sums over tensor-parallel ranks follow ``core/tensor_parallel/layers.py``. A row-parallel linear
sums its outputs, a column-parallel one the gradients of its input. Under sequence parallelism each
sum is a reduce-scatter, and divided tensors are gathered again. These are the input of a
column-parallel linear, in both passes, and the output gradient of a row-parallel one.

Context-parallel ranks exchange what an attention takes and gives by all-to-alls, and values that
are gathered (``tracing.context_parallel``).

Gradients are summed over replicas in the buckets of ``core/distributed/param_and_grad_buffer.py``
and ``core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.profile.context_costs import LayerContextCosts
from megatron_pulse.profile.layer_records import ShardSums

BUCKET_PARAMETERS = 40_000_000
"""Megatron's minimum bucket size, in gradient elements."""

BUCKET_PARAMETERS_PER_REPLICA = 1_000_000
"""Bucket size per replica, which decides for many replicas."""


class CollectiveKind(StrEnum):
    """Kinds of collectives."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class CollectiveCall:
    """One collective call. ``num_bytes`` is the size of the whole tensor, also where ranks hold
    parts. Of an all-to-all it is what one rank has for all ranks."""

    kind: CollectiveKind
    num_bytes: float


def collective_s(
    cluster: Cluster, call: CollectiveCall, ranks: Sequence[int], concurrent: int = 1
) -> float:
    """Seconds of ``call`` on ``ranks``, with ``concurrent`` such groups at once."""
    seconds = {
        CollectiveKind.ALL_REDUCE: cluster.allreduce_s,
        CollectiveKind.REDUCE_SCATTER: cluster.reduce_scatter_s,
        CollectiveKind.ALL_GATHER: cluster.all_gather_s,
        CollectiveKind.ALL_TO_ALL: cluster.all_to_all_s,
    }
    return seconds[call.kind](call.num_bytes, ranks, concurrent) if call.num_bytes else 0.0


def forward_sums(
    sums: ShardSums, samples: int, sequence_parallel: bool
) -> Iterator[CollectiveCall]:
    """Collectives of a layer's forward on one microbatch of ``samples``."""
    if sequence_parallel:
        yield from _all(CollectiveKind.ALL_GATHER, sums.columns, samples)
    kind = CollectiveKind.REDUCE_SCATTER if sequence_parallel else CollectiveKind.ALL_REDUCE
    yield from _all(kind, sums.rows, samples)


def recomputed_sums(
    sums: ShardSums, samples: int, sequence_parallel: bool
) -> Iterator[CollectiveCall]:
    """Collectives of recomputing a layer: a forward up to the last tensor that the backward
    needs."""
    repeated = replace(sums, rows=sums.rows[: sums.repeated_rows])
    return forward_sums(repeated, samples, sequence_parallel)


def backward_sums(
    sums: ShardSums, samples: int, sequence_parallel: bool
) -> Iterator[CollectiveCall]:
    """Collectives of a layer's whole backward on one microbatch of ``samples``."""
    yield from _all(CollectiveKind.ALL_REDUCE, sums.contexts, samples)
    if sequence_parallel:
        yield from _all(CollectiveKind.ALL_GATHER, sums.rows, samples)
        yield from _all(CollectiveKind.ALL_GATHER, sums.columns, samples)
    kind = CollectiveKind.REDUCE_SCATTER if sequence_parallel else CollectiveKind.ALL_REDUCE
    yield from _all(kind, sums.columns, samples)


def context_exchanges(
    layer: LayerContextCosts, samples: int, size: int, *, ring: bool, backward: bool
) -> Iterator[CollectiveCall]:
    """All-to-alls of a layer's forward or ``backward`` on one microbatch of ``samples``.

    Of ``size`` context-parallel ranks, each has its part of an attention's tensors, which take two
    exchanges. In a ``ring`` each passes its keys and values on, size - 1 times, and in a backward
    their gradients too: all-to-alls in which as many bytes leave a rank, all to the next one. Of a
    gathered value a rank sends its part to each rank.
    """
    attended = layer.all_to_all_bytes / size, 2 * layer.num_attentions
    if ring:
        shifts = (1 + backward) * (size - 1)
        attended = shifts * layer.ring_bytes / (size - 1), shifts * layer.num_attentions
    for num_bytes, calls in (attended, (layer.gathered_bytes, layer.num_gathers)):
        for _ in range(calls):
            yield CollectiveCall(CollectiveKind.ALL_TO_ALL, samples * num_bytes / calls)


def _all(kind: CollectiveKind, sizes: Sequence[int], samples: int) -> Iterator[CollectiveCall]:
    return (CollectiveCall(kind, samples * size) for size in sizes)


def buckets(
    parameters: Sequence[int], replicas: int, divided: bool, first: bool = True
) -> tuple[int, ...]:
    """Elements of a stage's gradient buckets in the order in which they fill, the last layers
    first.

    ``parameters`` are the element counts of the stage's tensors. The tensor that fills a bucket
    closes it. With the distributed optimizer (``divided``) tensors begin at multiples of 64, and
    buckets end at a multiple of 128 that the replicas divide. Only the ``first`` stage of the
    pipeline's first device has several buckets; any other stage has one.
    """
    most = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_REPLICA * replicas) if first else math.inf
    found, held = [], 0
    end = math.lcm(replicas, 128) if divided else 1
    for count in reversed(parameters):
        start = _up_to(held, 64) if divided else held
        held = start + count
        if held >= most:
            found.append(_up_to(held, end))
            held = 0
    if held:
        found.append(_up_to(held, end))
    return tuple(found)


def _up_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
