"""Ring attention: a rank's queries stay, keys and values of every rank visit it in turn.

A rank passes the visiting block on to the next one while it attends to it, so that it holds two
blocks at a time. Results of blocks are merged by their log-sum-exp. Source: Ring Attention
(arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pulse.tracing.context_parallel.collectives import Group, start_exchange
from megatron_pulse.tracing.context_parallel.division import Division, token_order

aten = torch.ops.aten

_SCORES = 1 << 26
"""Scores of queries and keys that plain products hold at a time."""
_FLASH_WIDTHS = range(8, 257, 8)
"""Widths of a head that flash attention takes as they are."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    segments: tuple[tuple[int, ...], tuple[int, ...]],
    scale: float | None,
    group: Group,
) -> Tensor:
    """Scaled dot product attention of divided tokens, for any number of heads.

    ``query [b, heads, own tokens, d]``, ``key`` and ``value`` are a rank's shares. Keys may have
    fewer heads, a divisor of the queries'. ``mask`` is boolean and whole (True: is attended to).
    ``segments`` are those of queries and of keys.
    """
    of_query, of_key = (Division(2, each) for each in segments)
    size = group.size()
    if mask is not None:
        if mask.dim() >= 2 and mask.shape[-2] > 1:
            own = of_query.own_tokens(group.rank(), size)
            mask = mask.index_select(-2, own.to(mask.device))
        if mask.shape[-1] > 1:
            mask = mask.index_select(-1, token_order(of_key.segments, size, mask.device))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _RingAttention.apply(
        query, key, value, mask, of_key.counts(size), scale, group
    )
    return result


class _RingAttention(torch.autograd.Function):
    """Attention of own queries to the keys of all ranks, of whom rank r has ``counts[r]``.

    Backward goes round again. Each visiting block's gradients are sent to its own rank, which sums
    them in fp32 (fp64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        counts: Sequence[int],
        scale: float,
        group: Group,
    ) -> Tensor:
        sums = query.new_full((*query.shape[:-1], 1), -torch.inf, dtype=_accumulated(query.dtype))
        result = sums.new_zeros((*query.shape[:-1], value.shape[-1]))
        ctx.rng = None, None
        for visit in _visits(key, value, mask, counts, group):
            block = _Block(query, visit, scale)
            found, own_sums, ctx.rng = block.forward()
            total = torch.logaddexp(sums, own_sums)
            result = result * _share(sums, total) + found * _share(own_sums, total)
            sums = total
            del visit, block  # the next block's memory is taken before they are made again
        rounded = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, rounded, sums)
        ctx.of = counts, scale, group
        return rounded

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, result, sums = ctx.saved_tensors
        counts, scale, group = ctx.of
        rank, size = group.rank(), len(counts)
        of_query = torch.zeros_like(query, dtype=sums.dtype)
        home = torch.zeros((), dtype=sums.dtype, device=query.device)
        arriving: Callable[[], Tensor] | None = None
        for visit in _visits(key, value, mask, counts, group):
            block, step = _Block(query, visit, scale), visit.step
            part, *of_visit = block.backward(gradient, result, sums, ctx.rng)
            del visit, block
            of_query += part
            if arriving is not None:
                home += arriving()
            if step == 0:
                home = _packed(*of_visit)
            else:
                rows = _packed(*of_visit).to(query.dtype)
                arriving = _start_shift(rows, -step, counts[rank], size, group)
        if arriving is not None:
            home += arriving()
        of_key, of_value = (part.to(query.dtype) for part in _unpacked(home, key.shape[-1]))
        return of_query.to(query.dtype), of_key, of_value, None, None, None, None


class _Visit(NamedTuple):
    """Block of keys and values of the rank ``step`` behind, with its columns of the mask."""

    step: int
    key: Tensor
    value: Tensor
    mask: Tensor | None


def _visits(
    key: Tensor, value: Tensor, mask: Tensor | None, counts: Sequence[int], group: Group
) -> Iterator[_Visit]:
    """Blocks of this rank, of the one before it, and so on; the next comes while one is used."""
    rank, size = group.rank(), len(counts)
    rows = _packed(key, value)
    for step in range(size):
        at = (rank - step) % size
        arriving = None
        if step < size - 1:
            arriving = _start_shift(rows, 1, counts[at - 1], size, group)
        columns = mask
        if mask is not None and mask.shape[-1] > 1:
            columns = mask.narrow(-1, sum(counts[:at]), counts[at])
        yield _Visit(step, *_unpacked(rows, key.shape[-1]), columns)
        if arriving is not None:
            rows = arriving()


def _start_shift(
    rows: Tensor, steps: int, num_rows: int, size: int, group: Group
) -> Callable[[], Tensor]:
    """Send ``rows`` to the rank ``steps`` ahead; the result gives ``num_rows`` of the one behind.

    An all-to-all of which all other parts are empty: ranks need no order of sends and receives.
    """
    give, get = [0] * size, [0] * size
    give[(group.rank() + steps) % size] = len(rows)
    get[(group.rank() - steps) % size] = num_rows
    return start_exchange(rows, give, get, group, "ring attention")


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values ``[b, heads, tokens, d]`` as one ``[tokens, b, heads, 2 d]``."""
    return torch.cat([key, value], -1).permute(2, 0, 1, 3).contiguous()


def _unpacked(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Inverse of ``_packed``, for keys of ``width``, as views."""
    both = rows.permute(1, 2, 0, 3)
    return both[..., :width], both[..., width:]


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """Type of sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _share(sums: Tensor, total: Tensor) -> Tensor:
    """Weight of what has the log-sum-exp ``sums`` in ``total``; 0 where nothing is attended to."""
    return (sums - total.masked_fill(total == -torch.inf, 0)).exp()


class _Block:
    """Attention of ``query [b, heads, own tokens, d]`` to one visiting block.

    Flash attention computes it where it can; else products of so many queries at a time that the
    scores stay small.
    """

    def __init__(self, query: Tensor, visit: _Visit, scale: float) -> None:
        self._query, self._mask, self._scale = query, visit.mask, scale
        self._repeats = query.shape[1] // visit.key.shape[1]
        self._key, self._value = visit.key, visit.value
        if self._repeats > 1:
            self._key, self._value = (
                part.repeat_interleave(self._repeats, 1) for part in (visit.key, visit.value)
            )
        on_gpu = (
            query.is_cuda
            and query.dtype in (torch.float16, torch.bfloat16)
            and self._mask is None
            and query.shape[-1] == visit.value.shape[-1] in _FLASH_WIDTHS
        )
        # On the meta device a GPU's kernels are counted.
        self._flash = (on_gpu or query.is_meta) and min(query.shape[2], visit.key.shape[2]) > 0

    def forward(self) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
        """Result ``[b, heads, own tokens, d]``, its log-sum-exp ``[b, heads, own tokens, 1]``, and
        what flash attention says of random numbers.
        """
        if self._flash:
            result, sums, _, _, _, _, *rng, _ = aten._scaled_dot_product_flash_attention(
                self._query, self._key, self._value, scale=self._scale
            )
            return result, sums[..., None], (rng[0], rng[1])
        key, value = self._plain(self._key), self._plain(self._value)
        results, every = [], []
        for rows in self._rows():
            scores = self._scores(rows, key)
            sums = scores.logsumexp(-1, keepdim=True)
            results.append(self._probabilities(rows, scores, sums) @ value)
            every.append(sums)
        return torch.cat(results, 2), torch.cat(every, 2), (None, None)

    def backward(
        self, gradient: Tensor, result: Tensor, sums: Tensor, rng: tuple[Any, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, from those of the attention to all blocks.

        ``result`` and its log-sum-exp ``sums`` are of all blocks.
        """
        if self._flash:
            lengths = self._query.shape[2], self._key.shape[2]
            given = gradient, self._query, self._key, self._value, result, sums[..., 0]
            of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_backward(
                *given, None, None, *lengths, 0.0, False, *rng, scale=self._scale
            )
            return of_query, self._summed(of_key.float()), self._summed(of_value.float())
        key, value = self._plain(self._key), self._plain(self._value)
        of_queries, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        for rows in self._rows():
            probabilities = self._probabilities(rows, self._scores(rows, key), sums[:, :, rows])
            of_result = self._plain(gradient[:, :, rows])
            inner = (of_result * result[:, :, rows]).sum(-1, keepdim=True)
            of_scores = probabilities * (of_result @ value.mT - inner) * self._scale
            of_queries.append(of_scores @ key)
            of_key += of_scores.mT @ self._plain(self._query[:, :, rows])
            of_value += probabilities.mT @ of_result
        return torch.cat(of_queries, 2), self._summed(of_key), self._summed(of_value)

    def _rows(self) -> Iterator[slice]:
        """Ranges of queries, at least one."""
        batch, heads, length, _ = self._query.shape
        step = max(_SCORES // max(batch * heads * self._key.shape[2], 1), 1)
        for first in range(0, max(length, 1), step):
            yield slice(first, first + step)

    def _scores(self, rows: slice, key: Tensor) -> Tensor:
        scores: Tensor = self._plain(self._query[:, :, rows]) @ key.mT * self._scale
        mask = self._mask_of(rows)
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)

    def _probabilities(self, rows: slice, scores: Tensor, sums: Tensor) -> Tensor:
        found = (scores - sums).exp()
        mask = self._mask_of(rows)
        return found if mask is None else found.masked_fill(~mask, 0)

    def _mask_of(self, rows: slice) -> Tensor | None:
        mask = self._mask
        return mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]

    def _plain(self, x: Tensor) -> Tensor:
        return x.to(_accumulated(x.dtype))

    def _summed(self, of_heads: Tensor) -> Tensor:
        """Gradient of keys' own heads."""
        if self._repeats == 1:
            return of_heads
        return of_heads.unflatten(1, (-1, self._repeats)).sum(2)
