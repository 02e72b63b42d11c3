"""Slices of tokens in hand-written layers: MLPs with their norms, modulation and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron_pulse.backbone.token_slices import TokenSlices, slice_counts
from model_specs.common.adapters import factors_beside

type _Place = tuple[nn.Module, str]
"""Module that holds a parameter, and the parameter's name there."""


class TokenSliced(nn.Module):
    """Base of layers with a token-wise part, which runs in ``token_slices`` slices (1: whole).

    Under sequence parallelism every rank slices its own tokens.
    """

    token_slices = 1

    def in_slices(
        self,
        function: Callable[..., torch.Tensor],
        modules: Sequence[nn.Module],
        tokens: Sequence[torch.Tensor],
        *wholes: torch.Tensor,
    ) -> torch.Tensor:
        """``function(*tokens, *wholes)``, whose dimension 0 is that of all ``tokens``.

        ``modules`` are those that the function calls, ``wholes`` other tensors with a gradient.
        """
        if self.token_slices == 1:
            return function(*tokens, *wholes)
        places = [place for module in modules for place in _places(module)]
        num_given = len(tokens) + len(wholes)

        def of_slice(*given: torch.Tensor) -> tuple[torch.Tensor]:
            with _held(places, given[num_given:]):
                return (function(*given[:num_given]),)

        counts = slice_counts(len(tokens[0]), self.token_slices)
        parameters = [module._parameters[name] for module, name in places]
        dims = *[0] * len(tokens), *[None] * (len(wholes) + len(parameters))
        slices = TokenSlices((of_slice,) * len(counts), counts, dims, (0,))
        (result,) = slices(*tokens, *wholes, *(p for p in parameters if p is not None))
        return result


def _places(module: nn.Module) -> Iterator[_Place]:
    """Parameters of a module, and those of adapters beside its linear maps."""
    for part in module.modules():
        yield from ((part, name) for name, p in part._parameters.items() if p is not None)
        yield from factors_beside(part)


@contextmanager
def _held(places: Sequence[_Place], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let modules compute with ``tensors`` in place of their parameters."""
    before = [module._parameters[name] for module, name in places]
    try:
        for (module, name), tensor in zip(places, tensors, strict=True):
            module._parameters[name] = tensor
        yield
    finally:
        for (module, name), parameter in zip(places, before, strict=True):
            module._parameters[name] = parameter
