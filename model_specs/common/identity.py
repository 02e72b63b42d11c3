"""Which options make two backbones different models, and which each run may choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.flag_fields import flag_value
from model_specs.common.options import CHOICE, REASON, SETTLED_BY, FamilyConfig, Value


@dataclass(frozen=True)
class BackboneComparison:
    """A backbone here beside one there: ``different`` makes another model, ``changed`` does not.

    Both are texts ("sample_size 64 there, 128 here: ...") that say what follows.
    """

    different: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def settle[C: FamilyConfig](config: C) -> C:
    """``config`` with the value of every field that was left open."""
    values = {key: getattr(config, property_) for key, property_ in _open(config).items()}
    return dataclasses.replace(config, **values)


def left_open[C: FamilyConfig](there: C, here: C) -> dict[str, Value]:
    """What ``here`` leaves open and ``there`` settles: options that continue the same model."""
    settled = settle(there)
    return {key: getattr(settled, key) for key in _open(here)}


def _open(config: FamilyConfig) -> dict[str, str]:
    """The fields that are left open, and the property that settles each in a new model."""
    return {
        field.name: field.metadata[SETTLED_BY]
        for field in dataclasses.fields(config)
        if SETTLED_BY in field.metadata and getattr(config, field.name) is None
    }


def compare_configs[C: FamilyConfig](
    there: C, here: C, unknown: Mapping[str, Any]
) -> BackboneComparison:
    """``here`` beside the model ``there``, whose options ``unknown`` no field of ours names."""
    there, here = settle(there), settle(here)
    different = [
        f"{key} {flag_value(value)} there, no option here" for key, value in unknown.items()
    ]
    changed = []
    for field in dataclasses.fields(here):
        theirs, ours = getattr(there, field.name), getattr(here, field.name)
        if theirs == ours:
            continue
        text = f"{field.name} {flag_value(theirs)} there, {flag_value(ours)} here"
        if CHOICE in field.metadata:
            changed.append(f"{text}: {field.metadata[CHOICE].format(here)}")
        else:
            reason = field.metadata.get(REASON)
            different.append(f"{text} ({reason})" if reason else text)
    return BackboneComparison(tuple(different), tuple(changed))
