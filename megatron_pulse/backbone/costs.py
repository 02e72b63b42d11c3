"""What planning knows of a chain's layers, whoever found it: times, bytes, parameters."""

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
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.faults import told

type Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SkipCost:
    """A skip edge from layer ``source`` to layer ``destination``, by their places in the chain.

    ``num_bytes`` is its size for one microbatch; a gradient of that size goes back where it
    ``wants`` one.
    """

    source: int
    destination: int
    num_bytes: int
    wants: bool = True


@dataclass(frozen=True)
class ChainCosts:
    """Every layer's costs at one microbatch size, in chain order.

    ``boundary_bytes[i]`` is what crosses a cut before layer i (nothing where a chain begins).
    ``saved_bytes`` is what a layer keeps from forward to backward. ``weight_grad_s`` is the part of
    a split backward that may be put off (empty: unknown), ``split_forward_s`` and
    ``split_backward_s`` are both passes where it is (empty: as whole). ``trained`` counts the
    parameters that have a gradient (empty: all); ``wants[i]`` says whether the tensors before layer
    i want one (empty: all do). Of a backward ``recompute_s`` are what its layer's activations take
    to be computed again (empty: nothing is), and ``again_bytes`` what they then are beside what is
    saved. ``shared_bytes`` are what a layer keeps that the one before keeps as well, without which
    ``saved_bytes`` are. ``waiting_bytes`` are what a layer holds between its input gradient and its
    weight gradient (empty: what is saved). ``starts`` are the layers where a chain begins.
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
    wants: tuple[bool, ...] = ()
    split_forward_s: tuple[float, ...] = ()
    split_backward_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    again_bytes: tuple[int, ...] = ()
    shared_bytes: tuple[int, ...] = ()
    waiting_bytes: tuple[int, ...] = ()
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        of_split = (self.split_forward_s, self.split_backward_s)
        times = (self.forward_s, self.backward_s, *(column for column in of_split if column))
        columns = (*times, self.parameters, self.saved_bytes, self.boundary_bytes)
        lengths = {len(column) for column in columns}
        lengths |= {
            len(column)
            for column in (
                *(self.weight_grad_s, self.trained, self.wants, *of_split),
                *(self.recompute_s, self.again_bytes, self.shared_bytes, self.waiting_bytes),
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
        """Every chain alone."""
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
        """Those of each layer that have a gradient and an optimizer's state."""
        return self.trained or self.parameters

    def __len__(self) -> int:
        return len(self.names)

    def of_schedule(self, split: bool) -> ChainCosts:
        """The same as a schedule with split backwards, or without, takes them."""
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
        """Of each layer forward and backward."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    def wants_gradient(self, layer: int) -> bool:
        """Whether the gradient of what enters ``layer`` goes back."""
        return self.wants[layer] if self.wants else True


def running_sum(values: Sequence[float]) -> Floats:
    """``[i]`` is the sum of the first i values."""
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def weighted_costs(
    backbone: Backbone,
    weights: Sequence[float],
    weight_grads: Sequence[float] | float | None = None,
) -> ChainCosts:
    """``backbone`` with ``weights`` as forward times and twice that as backward times, in any unit.

    A layer that is not trained takes its weight for its backward, where it has one, else nothing.
    ``weight_grads`` is the part of each layer's backward time that a split backward may put off, in
    the unit of ``weights``, or one share from 0 to 1 of all trained layers' (None: unknown). Bytes
    are of one sample in bf16; parameters and saved activations are unknown, and so 0.
    Raises ValueError for another number of weights, and with each that is no finite number, or is
    longer than its backward.
    """
    layers, num = backbone.layers, len(backbone.layers)
    wanted = wanted_gradients(backbone)
    gradients = [runs + layer.trained for layer, runs in zip(layers, wanted.layers, strict=True)]
    forward = _times(backbone, "weights", weights)
    backward = tuple(n * weight for n, weight in zip(gradients, forward, strict=True))
    if isinstance(weight_grads, SupportsFloat):
        share = _times(backbone, "the share of weight gradients", [weight_grads] * num)[0]
        if share > 1:
            raise ValueError(f"weight_grads must be a share from 0 to 1, or times, is {share:g}")
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
            told("weight gradients must be parts of trained layers' backwards", faults)
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
        wants=tuple(map(any, wanted.boundaries)),
        starts=backbone.starts,
    )


def _times(backbone: Backbone, what: str, values: Sequence[SupportsFloat]) -> tuple[float, ...]:
    """A number for each layer; raises ValueError with each that is none from 0 on."""
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
        raise ValueError(told(f"{what} must be finite numbers from 0 on", faults))
    return tuple(map(float, values))


def _half_bytes(spec: TensorSpec) -> int:
    return 2 * spec.numel_per_sample
