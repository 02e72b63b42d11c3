"""Collectives of context parallelism, with gradients.

A rank's gradient of a value that is whole on every rank is its term of a sum over ranks. A gradient
of a rank's own tokens is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.tracing.context_parallel.division import token_order

type Group = dist.ProcessGroup


class _AllToAll(torch.autograd.Function):
    """Rows of ``x`` to all ranks, ``give[r]`` to rank r; ``get[r]`` rows come from it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, give: Sequence[int], get: Sequence[int], group: Group
    ) -> Tensor:
        ctx.of = give, get, group
        return _exchange(x, give, get, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        give, get, group = ctx.of
        return _exchange(gradients[0], get, give, group), None, None, None


class _Gather(torch.autograd.Function):
    """Rows of all ranks, ``counts[r]`` of rank r; backward sums every rank's gradient of ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.of = counts, group
        size = len(counts)
        return _exchange(x.repeat(size, *[1] * (x.dim() - 1)), [len(x)] * size, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        counts, group = ctx.of
        own, size = counts[group.rank()], len(counts)
        terms = _exchange(gradients[0], counts, [own] * size, group)
        return terms.unflatten(0, (size, own)).sum(0), None, None


def start_exchange(
    x: Tensor, give: Sequence[int], get: Sequence[int], group: Group, of: str
) -> Callable[[], Tensor]:
    """Start to send rows of ``x``, ``give[r]`` to rank r; the result waits for ``get[r]`` of it.

    ``x`` is contiguous and must stay unchanged until then. Errors name the operation ``of``.
    """
    out = x.new_empty((sum(get), *x.shape[1:]))
    with _naming(of, group):
        work = dist.all_to_all_single(out, x, list(get), list(give), group=group, async_op=True)

    def finish() -> Tensor:
        with _naming(of, group):
            work.wait()
        return out

    return finish


@contextmanager
def _naming(of: str, group: Group) -> Iterator[None]:
    """Name the operation and the ranks in errors."""
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(f"{of} of the context-parallel ranks {ranks}: {error}") from error


def _exchange(x: Tensor, give: Sequence[int], get: Sequence[int], group: Group) -> Tensor:
    return start_exchange(x.contiguous(), give, get, group, "all-to-all")()


def gather(x: Tensor, dim: int, counts: Sequence[int], group: Group) -> Tensor:
    """Whole of a value of one segment, of whose dimension ``dim`` rank r has ``counts[r]``."""
    return _Gather.apply(x.movedim(dim, 0), counts, group).movedim(0, dim)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    segments: tuple[tuple[int, ...], tuple[int, ...]],
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    settings: Mapping[str, Any],
    group: Group,
) -> Tensor:
    """Scaled dot product attention of divided tokens, by all-to-alls over heads.

    ``query [b, heads, own tokens, d]``, ``key`` and ``value`` are a rank's shares, ``mask`` is
    whole. Each rank attends with its share of the heads to all tokens. ``segments`` and ``counts``
    are those of queries and of keys, whose heads must divide over the ranks. Source: DeepSpeed
    Ulysses (arXiv 2309.14509).
    """
    of_query, of_key = counts
    size, heads = len(of_query), query.shape[1]
    if mask is not None:
        for dim, own in zip((-2, -1), segments, strict=True):
            if len(own) > 1 and mask.dim() >= -dim and mask.shape[dim] > 1:
                mask = mask.index_select(dim, token_order(own, size, mask.device))
        if mask.dim() > 2 and mask.shape[-3] == heads > 1:
            mask = mask.chunk(size, -3)[group.rank()]
    query, key, value = (part.permute(2, 0, 1, 3) for part in (query, key, value))
    if segments[0] == segments[1]:
        query, key, value = to_heads((query, key, value), of_query, group)
    else:
        (query,) = to_heads((query,), of_query, group)
        key, value = to_heads((key, value), of_key, group)
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    result = F.scaled_dot_product_attention(query, key, value, mask, **settings)
    return to_tokens(result.permute(2, 0, 1, 3), of_query, group).permute(1, 2, 0, 3)


def to_heads(parts: Sequence[Tensor], counts: Sequence[int], group: Group) -> list[Tensor]:
    """Exchange own tokens of all heads for all tokens of this rank's share of the heads.

    ``parts [own tokens, b, heads, d]`` become ``[tokens, b, heads / size, d]``, the ranks' tokens
    one after another; ``counts`` are those of ranks.
    """
    size, own = len(counts), counts[group.rank()]
    if len({part.shape[-1] for part in parts}) > 1:
        return [to_heads((part,), counts, group)[0] for part in parts]
    given = [part.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for part in parts]
    rows = torch.cat(given, 3).flatten(0, 1)  # [size * own tokens, b, heads, d]
    got: Tensor = _AllToAll.apply(rows, [own] * size, counts, group)
    return list(got.split([part.shape[2] // size for part in parts], 2))


def to_tokens(result: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Inverse of ``to_heads``, of the result of attention."""
    size, own = len(counts), counts[group.rank()]
    got: Tensor = _AllToAll.apply(result, counts, [own] * size, group)
    return got.unflatten(0, (size, own)).permute(1, 2, 0, 3, 4).flatten(2, 3)
