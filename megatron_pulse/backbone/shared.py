"""Which of the tensors that a layer takes somebody else takes after it. Imports no torch.

::

    layer 0 ---x---> layer 1 ---> layer 2 ---> layer 3
             `-------- the skip "s" -------------^

On one device both are one tensor: had layer 1 written into x, layer 3 would find that in s. Where a
cut is between them, each has its own. So nobody may write into x, whose skip is taken later.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pulse.backbone.chain import Backbone


def shared_inputs(backbone: Backbone) -> tuple[Mapping[int | str, str], ...]:
    """For each layer those of its boundary inputs, by index, and of its skips, by name, that it or
    a later layer takes as a skip too, and that skip's name."""
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
