"""Which parameters of a backbone a run trains; the others are frozen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.faults import UserError, told, unmatched
from megatron_pulse.profile.measuring.building import meta_context


class TrainedError(UserError):
    """Patterns that choose nothing, or too little; the message lists every fault."""


def choose_trained(
    backbone: Backbone, train: Sequence[str] = (), freeze: Sequence[str] = ()
) -> Backbone:
    """``backbone`` of which those parameters are trained that match one of ``train``, and none of
    ``freeze``; all others are frozen.

    Patterns are those of fnmatch (``down_blocks.0.*``, ``*.bias``) for names in the whole model.
    Without ``train`` those are trained that ask for a gradient by themselves, as modules build
    them. Layers are built on the meta device for that; the result knows which of them have no
    trained parameter (``Layer.trained``), and its record, if there is one, has the patterns.
    Raises TrainedError for patterns that match no parameter (with close matches), and where no
    trained parameter is left.
    """
    parameters = _parameters(backbone)
    names = [layer.prefix + name for layer, own in parameters for name in own]
    faults = unmatched((*train, *freeze), names, "parameter's name")
    layers = []
    for layer, own in parameters:
        chosen = {
            name: _chosen(layer.prefix + name, asks, train, freeze) for name, asks in own.items()
        }
        build = layer.build
        if chosen != own:
            build = functools.partial(_build, layer.build, tuple(sorted(chosen.items())))
        layers.append(dataclasses.replace(layer, build=build, trained=any(chosen.values())))
    if not faults and not any(layer.trained for layer in layers):
        faults = [_none_left(len(names))]
    if faults:
        raise TrainedError(told(_what(backbone), faults))
    record = dict(backbone.record)
    if record:
        record.update(_recorded(train, freeze))
    return dataclasses.replace(backbone, layers=tuple(layers), record=record)


def none_trained(backbone: Backbone) -> str:
    """That no layer has anything to train, as where all was frozen in the module; else empty."""
    if any(layer.trained for layer in backbone.layers):
        return ""
    count = sum(len(own) for _, own in _parameters(backbone))
    return told(_what(backbone), [f"{_none_left(count)}: its module froze them by requires_grad"])


def _what(backbone: Backbone) -> str:
    return f"what to train of {backbone.name}"


def _none_left(count: int) -> str:
    return f"of its {count} parameters none is left to train"


def patterns_of(record: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``train`` and ``freeze`` of a backbone's record."""
    return tuple(record.get("train", ())), tuple(record.get("freeze", ()))


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """A backbone's record without what is trained of it: that of the same model."""
    return {key: value for key, value in record.items() if key not in ("train", "freeze")}


def trained_as(backbone: Backbone, record: Mapping[str, Any]) -> Backbone:
    """``backbone`` with what ``record``, of a backbone, says of training."""
    patterns = patterns_of(record)
    return choose_trained(backbone, *patterns) if any(patterns) else backbone


def shown_patterns(patterns: tuple[Sequence[str], Sequence[str]]) -> str:
    """What is trained, in a few words."""
    train, freeze = patterns
    return (", ".join(train) or "everything") + (f" but {', '.join(freeze)}" if freeze else "")


def _recorded(train: Sequence[str], freeze: Sequence[str]) -> dict[str, list[str]]:
    """What a record says of these; nothing of patterns that were not given."""
    given = (("train", list(train)), ("freeze", list(freeze)))
    return {key: patterns for key, patterns in given if patterns}


def _parameters(backbone: Backbone) -> list[tuple[Layer, dict[str, bool]]]:
    """Each layer, its parameters' own names, and whether they ask for a gradient."""
    import torch

    from megatron_pulse.profile.measuring.module_check import naming_module_faults

    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        return [
            (layer, {n: p.requires_grad for n, p in layer.build(context).named_parameters()})
            for layer in backbone.layers
        ]


def _chosen(name: str, asks: bool, train: Sequence[str], freeze: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in freeze):
        return False
    return any(fnmatchcase(name, pattern) for pattern in train) if train else asks


def _build(build: Callable[[Any], Any], chosen: tuple[tuple[str, bool], ...], context: Any) -> Any:
    module = build(context)
    parameters = dict(module.named_parameters())
    for name, trained in chosen:
        parameters[name].requires_grad_(trained)
    return module
