"""Declarations of classes that also take a reference picture.

Its tokens follow those of the noisy sample, and their prediction is cut off. Rows of latents become
tokens one after another, so the picture is appended below the sample, before packing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from model_specs.derived.inputs import (
    Around,
    Config,
    Declared,
    Input,
    SameInput,
    Sizes,
    appending,
)

NO_REFERENCE = {"reference": 0}
"""Size of a run: the number of reference pictures, which are as large as the sample."""
_ROWS = 2
"""Axis of rows in latents ``[b, c, h, w]``."""

type Positions = Mapping[str, Callable[[Any], Any]]
"""Functions from the positions of a sample's tokens to those of both, by name of the input."""


def shifted(*first: int) -> Callable[[Any], Any]:
    """Positions ``[n, axes]``, then those of the reference, which are ``first`` behind them."""

    def both(positions: Any) -> Any:
        import torch

        return torch.cat([positions, positions + torch.tensor(first)])

    return both


def repeated(shapes: list[list[Any]]) -> list[list[Any]]:
    """Shapes of each sample's pictures (Qwen-Image), twice."""
    return [[*each, *each] for each in shapes]


def with_reference(
    declare: Callable[[Config, Sizes], Declared], positions: Positions
) -> Callable[[Config, Sizes], Declared]:
    """``declare`` with the field ``reference_image``, if the run's sizes have a reference."""

    def declared(config: Config, size: Sizes) -> Declared:
        plain = declare(config, size)
        if not size.reference:
            return plain
        if size.reference > 1:
            raise ValueError(f"reference: must be 0 or 1, is {size.reference}")
        if any(isinstance(each, Input) and each.appended for each in plain.inputs):
            raise ValueError("reference: a model that inpaints takes none")
        inputs: list[Input | SameInput] = []
        for each in plain.inputs:
            if isinstance(each, SameInput) and (both := positions.get(each.path)) is not None:
                each = SameInput(each.path, functools.partial(_both, both, each.value))
            inputs.append(each)
            if isinstance(each, Input) and each.path == plain.sample:
                inputs.append(Input(REFERENCE_IMAGE, each.shape))
        assert plain.around is not None
        return replace(plain, inputs=tuple(inputs), around=_around(plain.around, plain.sample))

    return declared


def _both(both: Callable[[Any], Any], value: Callable[[int], Any], batch: int) -> Any:
    return both(value(batch))


def _around(inner: Around, sample: str) -> Around:
    def around(given: Any) -> Callable[..., Any]:
        joined = appending(inner(given), sample, [REFERENCE_IMAGE], _ROWS)

        @functools.wraps(joined)
        def call(**inputs: Any) -> Any:
            return joined(**inputs)[:, :, : inputs[sample].shape[_ROWS]]

        return call

    return around
