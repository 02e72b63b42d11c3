"""Static analysis of a chain: layer inputs that a later layer takes too. Imports no torch.

::

    layer 0 ---x---> layer 1 ---> layer 2 ---> layer 3
             `-------- the skip "s" -------------^

On one device x and s are one tensor, and a write into x by layer 1 would change s for layer 3. With
a cut in between, each device has its own tensor. No layer may therefore modify x in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pulse.backbone.chain import Backbone


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
