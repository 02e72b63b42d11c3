"""Parameters that a run trains; the others are frozen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from megatron_pulse.adapters.adapter import describe
from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.errors import UserError, format_faults, unmatched_patterns
from megatron_pulse.profile.measurement.layer_context import meta_context


class TrainedError(UserError):
    """Patterns that match nothing, or leave nothing to train; the message lists every fault."""


def choose_trained(
    backbone: Backbone, train: Sequence[str] = (), freeze: Sequence[str] = ()
) -> Backbone:
    """Select trained parameters: those that match ``train`` and do not match ``freeze``.

    Patterns are fnmatch's (``down_blocks.0.*``, ``*.bias``) on names in the whole model. Without
    ``train`` a parameter's own ``requires_grad`` decides. Layers are built on the meta device for
    this purpose. The result marks layers without trained parameters (``Layer.trained``), and its
    record, if any, contains the patterns.

    Raises TrainedError for patterns without a match (suggesting close ones), and if no trained
    parameter is left.
    """
    parameters = _parameters(backbone)
    names = [layer.prefix + name for layer, own in parameters for name in own]
    faults = unmatched_patterns((*train, *freeze), names, "parameter's name")
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
        raise TrainedError(format_faults(_what(backbone), faults))
    record = dict(backbone.record)
    if record:
        record.update(_recorded(train, freeze))
    return dataclasses.replace(backbone, layers=tuple(layers), record=record)


def none_trained(backbone: Backbone) -> str:
    """Error text if no layer has trained parameters, since the module froze all; else empty."""
    if any(layer.trained for layer in backbone.layers):
        return ""
    count = sum(len(own) for _, own in _parameters(backbone))
    return format_faults(
        _what(backbone), [f"{_none_left(count)}: its module set requires_grad = False"]
    )


def _what(backbone: Backbone) -> str:
    return f"trained parameters of {backbone.name}"


def _none_left(count: int) -> str:
    return f"none of its {count} parameters is trained"


class TrainedPart(NamedTuple):
    """Part of a model that a run trains: parameters by patterns, and an adapter (its record).

    ``quantization`` is that of the frozen weights below an adapter (None: they are not quantised).
    """

    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    adapter: Mapping[str, Any] | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        every = "everything" if self.adapter is None else describe(self.adapter)
        every += f" over {self.quantization} weights" if self.quantization else ""
        said = ", ".join(self.train) or every
        return said + (f" but {', '.join(self.freeze)}" if self.freeze else "")


def trained_part(record: Mapping[str, Any]) -> TrainedPart:
    """Part that a run with this backbone's record trains."""
    return TrainedPart(
        tuple(record.get("train", ())),
        tuple(record.get("freeze", ())),
        record.get("adapter"),
        record.get("quantization"),
    )


def copies_reference(record: Mapping[str, Any]) -> bool:
    """True if a preference loss needs a frozen copy of weights that this record's run trains.

    A run that trains an adapter alone has the reference in its frozen weights.
    """
    part = trained_part(record)
    return part.adapter is None or bool(part.train)


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Record without what is trained, equal for all trainings of one model."""
    return {key: value for key, value in record.items() if key not in TrainedPart._fields}


def _recorded(train: Sequence[str], freeze: Sequence[str]) -> dict[str, list[str]]:
    """Entries of the patterns in a record, without empty ones."""
    given = (("train", list(train)), ("freeze", list(freeze)))
    return {key: patterns for key, patterns in given if patterns}


def _parameters(backbone: Backbone) -> list[tuple[Layer, dict[str, bool]]]:
    """Each layer, with ``requires_grad`` by its parameters' own names."""
    import torch

    from megatron_pulse.profile.measurement.module_check import naming_module_faults

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
