"""Costs of a chain's layers for planning: times, bytes and parameters, measured or estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.errors import format_faults

type Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SkipCost:
    """Skip edge from layer ``source`` to layer ``destination``, by index in the chain.

    ``num_bytes`` is the size for one microbatch. With ``needs_grad``, a gradient of this size is
    sent back.
    """

    source: int
    destination: int
    num_bytes: int
    needs_grad: bool = True


@dataclass(frozen=True)
class ChainCosts:
    """Costs of every layer at one microbatch size, in chain order.

    Columns marked (optional) may be empty, with the given meaning.

    - ``boundary_bytes[i]``: bytes across a cut before layer i; 0 where a chain begins.
    - ``saved_bytes``: bytes kept from forward to backward, without ``shared_bytes``.
    - ``shared_bytes`` (optional): bytes that the previous layer keeps as well.
    - ``weight_grad_s`` (optional: unknown): deferrable part of a split backward.
    - ``split_forward_s``, ``split_backward_s`` (optional: as unsplit): times of both passes with
      split backward.
    - ``trained`` (optional: all): number of parameters with a gradient.
    - ``stored`` (optional: ``parameters``): parameters, where quantised ones count as as many as
      take their bytes.
    - ``needs_grad[i]`` (optional: true): the tensors before layer i need a gradient.
    - ``recompute_s`` (optional: none): part of the backward time spent on recomputation.
    - ``recompute_bytes``: bytes recomputed, in addition to saved ones.
    - ``wgrad_bytes`` (optional: as saved): bytes held between input gradient and weight gradient.
    - ``starts``: layers where a chain begins.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameters: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    skips: tuple[SkipCost, ...] = ()
    weight_grad_s: tuple[float, ...] = ()
    trained: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    split_forward_s: tuple[float, ...] = ()
    split_backward_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    recompute_bytes: tuple[int, ...] = ()
    shared_bytes: tuple[int, ...] = ()
    wgrad_bytes: tuple[int, ...] = ()
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        of_split = (self.split_forward_s, self.split_backward_s)
        times = (self.forward_s, self.backward_s, *(column for column in of_split if column))
        columns = (*times, self.parameters, self.saved_bytes, self.boundary_bytes)
        lengths = {len(column) for column in columns}
        lengths |= {
            len(column)
            for column in (
                *(self.weight_grad_s, self.trained, self.stored, self.needs_grad, *of_split),
                *(self.recompute_s, self.recompute_bytes, self.shared_bytes, self.wgrad_bytes),
            )
            if column
        }
        if lengths != {len(self.names)}:
            raise ValueError(f"{len(self.names)} layers, but columns of {sorted(lengths)} values")
        values = np.array([*times, self.parameters, self.saved_bytes], dtype=np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError("costs must be finite and not negative")

    @property
    def chains(self) -> tuple[ChainCosts, ...]:
        """Costs of every chain separately."""
        return tuple(
            self._only(first, last) for first, last in pairwise((*self.starts, len(self.names)))
        )

    def _only(self, first: int, last: int) -> ChainCosts:
        skips = tuple(
            replace(s, source=s.source - first, destination=s.destination - first)
            for s in self.skips
            if first <= s.source < last
        )
        columns: dict[str, Any] = {f.name: getattr(self, f.name)[first:last] for f in fields(self)}
        return ChainCosts(**{**columns, "skips": skips, "starts": (0,)})

    @property
    def trained_parameters(self) -> tuple[int, ...]:
        """Number of each layer's parameters with a gradient and optimizer state."""
        return self.trained or self.parameters

    @property
    def stored_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer by the bytes that they take, in units of one of the run's."""
        return self.stored or self.parameters

    def __len__(self) -> int:
        return len(self.names)

    def of_schedule(self, split: bool) -> ChainCosts:
        """Costs with the times of split backward, or of whole backward."""
        return self._of_split if split else self

    @cached_property
    def _of_split(self) -> ChainCosts:
        forward_s, backward_s = self.split_forward_s, self.split_backward_s
        return replace(
            self,
            forward_s=forward_s or self.forward_s,
            backward_s=backward_s or self.backward_s,
            split_forward_s=(),
            split_backward_s=(),
        )

    @cached_property
    def work_s(self) -> tuple[float, ...]:
        """Forward plus backward time of each layer."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    def boundary_needs_grad(self, layer: int) -> bool:
        """True if the gradient of the input of ``layer`` is sent back."""
        return self.needs_grad[layer] if self.needs_grad else True


def running_sum(values: Sequence[float]) -> Floats:
    """Prefix sums: ``[i]`` is the sum of the first i values."""
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def weighted_costs(
    backbone: Backbone,
    weights: Sequence[float],
    weight_grads: Sequence[float] | float | None = None,
) -> ChainCosts:
    """Costs of ``backbone`` with ``weights`` as forward times, in any unit.

    Backward takes twice the forward time. Without training it takes the forward time, or none if no
    gradient passes. ``weight_grads`` is the deferrable part of each layer's backward time, in the
    unit of ``weights``. A single number is a share from 0 to 1 for all trained layers (None:
    unknown). Bytes are of one sample in bf16. Parameters and saved activations are unknown and set
    to 0.

    Raises ValueError for a wrong number of weights. Also raises ValueError listing weights that are
    not finite, and weight gradients that take longer than the backward.
    """
    layers, num = backbone.layers, len(backbone.layers)
    wanted = required_gradients(backbone)
    gradients = [runs + layer.trained for layer, runs in zip(layers, wanted.layers, strict=True)]
    forward = _times(backbone, "weights", weights)
    backward = tuple(n * weight for n, weight in zip(gradients, forward, strict=True))
    if isinstance(weight_grads, SupportsFloat):
        share = _times(backbone, "weight gradients' share of backward time", [weight_grads] * num)[
            0
        ]
        if share > 1:
            raise ValueError(
                f"weight_grads must be a share from 0 to 1, or a list of times, is {share:g}"
            )
        apart = tuple(share * b * la.trained for b, la in zip(backward, layers, strict=True))
    else:
        apart = () if weight_grads is None else _times(backbone, "weight_grads", weight_grads)
    most = [b if layer.trained else 0.0 for b, layer in zip(backward, layers, strict=True)]
    if faults := [
        f"{layer.name}: {time:g} of {whole:g}"
        for layer, time, whole in zip(layers, apart, most, strict=False)
        if time > whole
    ]:
        raise ValueError(
            format_faults(
                "weight gradient times must not exceed the backward times of trainable layers",
                faults,
            )
        )
    none = (0,) * num
    return ChainCosts(
        tuple(layer.name for layer in layers),
        forward,
        backward,
        none,
        none,
        tuple(
            0 if i in backbone.starts else sum(map(_half_bytes, layer.inputs))
            for i, layer in enumerate(layers)
        ),
        tuple(
            SkipCost(s.source, s.destination, _half_bytes(s.spec), wanted.skips[s.name])
            for s in backbone.skips
        ),
        weight_grad_s=apart,
        needs_grad=tuple(map(any, wanted.boundaries)),
        starts=backbone.starts,
    )


def _times(backbone: Backbone, what: str, values: Sequence[SupportsFloat]) -> tuple[float, ...]:
    """Check one finite non-negative number per layer; ValueError lists the others."""
    if len(values) != len(backbone.layers):
        raise ValueError(
            f"{backbone.name}: need {len(backbone.layers)} {what}, one per layer; got {len(values)}"
        )
    faults = [
        f"{layer.name}: {value!r}"
        for layer, value in zip(backbone.layers, values, strict=True)
        if not (isinstance(value, SupportsFloat) and 0 <= float(value) < math.inf)
    ]
    if faults:
        raise ValueError(format_faults(f"{what} must be finite numbers from 0 on", faults))
    return tuple(map(float, values))


def _half_bytes(spec: TensorSpec) -> int:
    return 2 * spec.numel_per_sample
