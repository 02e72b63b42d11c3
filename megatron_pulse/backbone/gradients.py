"""Which tensors of a chain want a gradient, before anything runs. Imports no torch.

A gradient is wanted where something before is trained: what a layer returns wants one if the layer
is trained or takes anything that wants one; what only passes by wants one if it did before. The
noisy sample and the batch want none. Layers
that are frozen, with only such before them, have no backward pass, and keep no activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_pulse.backbone.chain import Backbone


@dataclass(frozen=True)
class WantedGradients:
    """Which tensors between a chain's layers want a gradient.

    ``boundaries[i]`` are those that enter layer i, ``layers[i]`` says whether layer i has a
    backward pass, ``skips`` and ``conditioning`` go by name (the batch's fields are not there).
    """

    boundaries: tuple[tuple[bool, ...], ...]
    layers: tuple[bool, ...]
    skips: Mapping[str, bool]
    conditioning: Mapping[str, bool]


def wanted_gradients(backbone: Backbone) -> WantedGradients:
    """The gradients that a step of ``backbone`` computes between its layers."""
    boundaries, layers, starts = [], [], backbone.starts
    skips: dict[str, bool] = {}
    conditioning: dict[str, bool] = {}
    entering: tuple[bool, ...] = ()
    for i, layer in enumerate(backbone.layers):
        if i in starts:
            entering = (False,) * len(layer.inputs)
        boundaries.append(entering)
        passing = set(layer.beside.values())
        taken = any(wants for k, wants in enumerate(entering) if k not in passing)
        within = taken and not layer.embedder
        within |= any(skips[name] for name in layer.pops)
        within |= any(conditioning.get(name, False) for name in layer.uses)
        within |= layer.trained
        if not layer.embedder:
            entering = tuple(
                entering[layer.beside[k]] if k in layer.beside else within and spec.differentiable
                for k, spec in enumerate(layer.outputs)
            )
        for name, index in layer.pushes.items():
            skips[name] = entering[index]
        for name, spec in layer.provides.items():
            conditioning[name] = within and spec.differentiable
        layers.append(within)
    return WantedGradients(tuple(boundaries), tuple(layers), skips, conditioning)
