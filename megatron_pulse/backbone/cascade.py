"""Cascade: several backbones trained in one run, as independent chains one after another.

Cascades train a model of small samples and one or more upsampling models, each on its own data.
Together they form one backbone of several chains::

    base.in_proj ... base.out_proj | upper.in_proj ... upper.out_proj

Names of layers, skips, conditioning and batch fields begin with the chain's name, and so do
parameters in checkpoints. Modules do not know their chain's name. Initial weights of layers equal
those of a run of one chain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.backbone.check import BackboneError, check_backbone

CASCADE = "cascade"
"""Family name in the record of a cascade."""

_CHAIN_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


def cascade(parts: Mapping[str, Backbone]) -> Backbone:
    """Combine ``parts``, by chain name, into one backbone of several chains.

    Raises BackboneError listing every fault:

    - fewer than two parts;
    - names that cannot prefix parameter names;
    - parts that are invalid or cascades;
    - samples of several shapes.
    """
    if faults := _faults(parts):
        raise BackboneError(" + ".join(parts), faults)
    layers = tuple(_within(name, layer) for name, part in parts.items() for layer in part.layers)
    fields = {
        f"{name}.{field}": spec
        for name, part in parts.items()
        for field, spec in part.batch_fields.items()
    }
    record = {
        "name": CASCADE,
        "options": {name: dict(part.saved_record) for name, part in parts.items()},
    }
    heads = tuple(dict.fromkeys(count for part in parts.values() for count in part.num_heads))
    called = " + ".join(f"{name} {part.name}" for name, part in parts.items())
    return Backbone(called, layers, fields, record, num_heads=heads, parts=dict(parts))


def _faults(parts: Mapping[str, Backbone]) -> list[str]:
    faults = []
    if len(parts) < 2:
        faults.append("a cascade has two backbones or more")
    for name, part in parts.items():
        if not _CHAIN_NAME.fullmatch(name):
            faults.append(
                f"{name!r} cannot begin names: use letters, digits and underscores, a letter first"
            )
        faults += [f"{name}: {fault}" for fault in check_backbone(part)]
        if part.parts:
            faults.append(f"{name}: is a cascade itself: name its backbones here")
        elif part.layers and part.num_shapes > 1:
            faults.append(f"{name}: samples of several shapes cannot be part of a cascade")
    return faults


def _within(chain: str, layer: Layer) -> Layer:
    """Rename a layer of a single backbone as one of ``chain``."""

    def named(name: str) -> str:
        return f"{chain}.{name}"

    return replace(
        layer,
        name=named(layer.name),
        pushes={named(name): index for name, index in layer.pushes.items()},
        pops={named(name): spec for name, spec in layer.pops.items()},
        provides={named(name): spec for name, spec in layer.provides.items()},
        uses=tuple(map(named, layer.uses)),
        chain=chain,
    )
