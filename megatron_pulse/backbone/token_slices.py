"""Slices of tokens: a token-wise part of a layer, computed slice by slice in both passes.

Between forward and backward only the part's inputs are kept. The backward pass takes one slice
after another: it computes the slice again, then its gradients, and frees both before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.token_shares import share_of

type TokenWise = Callable[..., tuple[Tensor, ...]]
"""Function of tensors that treats every token by itself."""


def set_token_slices(modules: Iterable[Any], count: int) -> bool:
    """Set the number of slices of the parts that have one; True if any part has.

    Such parts have the attribute ``token_slices``.
    """
    parts = [part for part in modules if hasattr(part, "token_slices")]
    for part in parts:
        part.token_slices = count
    return bool(parts)


def slice_counts(length: int, slices: int) -> tuple[int, ...]:
    """Number of tokens of each slice; the first slices may have one token more.

    Fewer tokens than slices make as many slices as tokens.
    """
    slices = max(1, min(length, slices))
    return tuple(share_of(length, index, slices)[1] for index in range(slices))


@dataclass(frozen=True)
class TokenSlices:
    """Token-wise work in slices of ``counts`` tokens.

    - ``functions``: of each slice, from shares of the inputs to shares of the results.
    - ``inputs``: dimension of the tokens of each input; None for an input that is given whole.
    - ``results``: dimension of the tokens of each result.
    """

    functions: tuple[TokenWise, ...]
    counts: tuple[int, ...]
    inputs: tuple[int | None, ...]
    results: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the slices on whole inputs; returns whole results.

        The gradient of an input that is given whole, such as a weight, is the sum over slices. In
        half precision the sum is taken in fp32 and rounded once. Gradients of weights are part of
        the backward pass, and are never deferred.
        """
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            return self.forward(inputs)
        # A recomputation of the whole layer ends with its last saved tensor: save before the work.
        results: tuple[Tensor, ...] = _Sliced.apply(self, _Save.apply(*inputs), *inputs)
        return results

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Results of all slices."""
        wholes: list[Tensor] = []
        for function, start, count in self._slices():
            parts = function(*self._shares(inputs, start, count))
            if not wholes:
                pairs = zip(parts, self.results, strict=True)
                wholes = [_empty_whole(part, dim, sum(self.counts)) for part, dim in pairs]
            for whole, part, dim in zip(wholes, parts, self.results, strict=True):
                whole.narrow(dim, start, count).copy_(part)
            del parts
        return tuple(wholes)

    def backward(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the inputs that need one, from those of the results."""
        found: list[Tensor | None] = [None] * len(inputs)
        wanted = [index for index, needed in enumerate(needs) if needed]
        terms = [0] * len(inputs)
        for function, start, count in self._slices():
            shares = [share.detach() for share in self._shares(inputs, start, count)]
            given = [shares[index].requires_grad_() for index in wanted]
            with torch.enable_grad():
                parts = function(*shares)
            ends = [
                (part, gradient.narrow(dim, start, count))
                for part, gradient, dim in zip(parts, gradients, self.results, strict=True)
                if gradient is not None and part.requires_grad
            ]
            del shares, parts
            if not ends:
                continue
            outputs, of_outputs = zip(*ends, strict=True)
            of_slice = list(torch.autograd.grad(outputs, given, of_outputs, allow_unused=True))
            del ends, outputs, of_outputs, given
            for index in reversed(wanted):
                term = of_slice.pop()
                dim = self.inputs[index]
                if term is None:
                    continue
                if dim is None:
                    found[index] = _add(found[index], term, terms[index])
                    terms[index] += 1
                    continue
                whole = found[index]
                if whole is None:
                    # Slices without a gradient leave zeros.
                    whole = found[index] = term.new_zeros(inputs[index].shape)
                whole.narrow(dim, start, count).copy_(term)
        return [
            None if found_one is None else found_one.to(given_one.dtype)
            for found_one, given_one in zip(found, inputs, strict=True)
        ]

    def _slices(self) -> Iterator[tuple[TokenWise, int, int]]:
        """Function, first token and number of tokens of each slice."""
        start = 0
        for function, count in zip(self.functions, self.counts, strict=True):
            yield function, start, count
            start += count

    def _shares(self, inputs: Sequence[Tensor], start: int, count: int) -> list[Tensor]:
        return [
            tensor if dim is None else tensor.narrow(dim, start, count)
            for tensor, dim in zip(inputs, self.inputs, strict=True)
        ]


class _Save(torch.autograd.Function):
    """Saves its inputs; its result holds nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Sliced(torch.autograd.Function):
    """``TokenSlices``, with the inputs that the node of ``saved`` has saved."""

    @staticmethod
    def forward(ctx: Any, work: TokenSlices, saved: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.work, ctx.saved, ctx.within = work, saved.grad_fn, tuple(autocasts())
        ctx.set_materialize_grads(False)
        return work.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with ExitStack() as stack:
            for make_context in ctx.within:
                stack.enter_context(make_context())
            found = ctx.work.backward(ctx.saved.saved_tensors, gradients, ctx.needs_input_grad[2:])
        return (None, None, *found)


def autocasts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts that reproduce the autocast regions open in the caller."""
    return [
        partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]


def _empty_whole(part: Tensor, dim: int, length: int) -> Tensor:
    """Uninitialised tensor of ``length`` tokens, with its dimensions in memory as in ``part``."""
    order = sorted(range(part.dim()), key=lambda d: (-part.stride(d), d))
    shape = [length if d == dim else size for d, size in enumerate(part.shape)]
    whole = part.new_empty([shape[d] for d in order])
    return whole.permute([order.index(d) for d in range(part.dim())])


def _add(total: Tensor | None, term: Tensor, terms: int) -> Tensor:
    """Sum of a gradient's ``terms`` so far and the next, in fp32 at least."""
    if total is None:
        return term
    if terms == 1:  # the first term may be shared
        return total.to(torch.promote_types(torch.float32, total.dtype)) + term
    return total.add_(term)
