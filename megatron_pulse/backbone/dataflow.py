"""Static analysis of a chain's tensors: which need a gradient, and which a later layer takes too.

Imports no torch. A layer's results need a gradient if the layer is trained or takes a tensor that
needs one. Tensors that pass by need one if they did before. The noisy sample and the batch need
none. Frozen layers with only frozen layers before them have no backward pass and keep no
activations.

Of a layer input that a later layer takes too, one device has one tensor, while with a cut in
between each device has its own::

    layer 0 ---x---> layer 1 ---> layer 2 ---> layer 3
             `-------- the skip "s" -------------^

No layer may therefore modify x in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_pulse.backbone.chain import Backbone


@dataclass(frozen=True)
class RequiredGradients:
    """Tensors between a chain's layers that need a gradient.

    ``boundaries[i]`` covers the tensors that enter layer i. ``layers[i]`` is true if layer i has a
    backward pass. ``skips`` and ``conditioning`` are by name, without batch fields.
    """

    boundaries: tuple[tuple[bool, ...], ...]
    layers: tuple[bool, ...]
    skips: Mapping[str, bool]
    conditioning: Mapping[str, bool]


def required_gradients(backbone: Backbone) -> RequiredGradients:
    """Gradients that a step of ``backbone`` computes between its layers."""
    boundaries, layers, starts = [], [], backbone.starts
    skips: dict[str, bool] = {}
    conditioning: dict[str, bool] = {}
    entering: tuple[bool, ...] = ()
    for i, layer in enumerate(backbone.layers):
        if i in starts:
            entering = (False,) * len(layer.inputs)
        boundaries.append(entering)
        passing = set(layer.beside.values())
        taken = any(needs_grad for k, needs_grad in enumerate(entering) if k not in passing)
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
    return RequiredGradients(tuple(boundaries), tuple(layers), skips, conditioning)


def shared_inputs(backbone: Backbone) -> tuple[Mapping[int | str, str], ...]:
    """Inputs and skips of each layer that the layer or a later one takes as a skip too.

    Maps boundary inputs, by index, and skips, by name, to the name of this skip.
    """
    taken = {name: i for i, layer in enumerate(backbone.layers) for name in layer.pops}
    found: list[Mapping[int | str, str]] = []
    entering: tuple[frozenset[str], ...] = ()
    same: dict[str, frozenset[str]] = {}
    for i, layer in enumerate(backbone.layers):
        if i in backbone.starts:
            entering = (frozenset(),) * len(layer.inputs)
        later = {name for name, at in taken.items() if at > i}
        others: dict[int | str, frozenset[str]] = {
            k: names & (later | layer.pops.keys()) for k, names in enumerate(entering)
        }
        others |= {name: same[name] & later for name in layer.pops}
        found.append({what: min(names) for what, names in others.items() if names})
        if not layer.embedder:
            entering = tuple(
                entering[layer.beside[k]] if k in layer.beside else frozenset()
                for k in range(len(layer.outputs))
            )
        for name, index in layer.pushes.items():
            entering = (*entering[:index], entering[index] | {name}, *entering[index + 1 :])
        same |= dict.fromkeys(layer.pushes, frozenset())
        for names in entering:
            same |= {name: same[name] | names for name in names}
    return tuple(found)
