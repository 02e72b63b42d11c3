"""Comparison of two configurations: options that change the model, and choices of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_specs.common.options import (
    CHOICE,
    REASON,
    SETTLED_BY,
    FamilyConfig,
    Value,
    option_text,
)


@dataclass(frozen=True)
class BackboneComparison:
    """Differences between a backbone here and a backbone there.

    Options in ``different`` make another model; options in ``changed`` do not. Both are texts
    ("sample_size 64 there, 128 here: ...") that state the consequence.
    """

    different: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def settle[C: FamilyConfig](config: C) -> C:
    """``config`` with every unset ``settled_by`` field filled in."""
    values = {key: getattr(config, property_) for key, property_ in _open(config).items()}
    return dataclasses.replace(config, **values)


def left_open[C: FamilyConfig](there: C, here: C) -> dict[str, Value]:
    """Options unset in ``here``, with the values of ``there``; they continue the same model."""
    settled = settle(there)
    return {key: getattr(settled, key) for key in _open(here)}


def _open(config: FamilyConfig) -> dict[str, str]:
    """Unset ``settled_by`` fields, and the property that settles each in a new model."""
    return {
        field.name: field.metadata[SETTLED_BY]
        for field in dataclasses.fields(config)
        if SETTLED_BY in field.metadata and getattr(config, field.name) is None
    }


def compare_configs[C: FamilyConfig](
    there: C, here: C, unknown: Mapping[str, Any]
) -> BackboneComparison:
    """Compare ``here`` with the model ``there``; ``unknown`` are options of ``there`` without a
    field.
    """
    there, here = settle(there), settle(here)
    different = [
        f"{key} {option_text(value)} there, no option here" for key, value in unknown.items()
    ]
    changed = []
    for field in dataclasses.fields(here):
        theirs, ours = getattr(there, field.name), getattr(here, field.name)
        if theirs == ours:
            continue
        text = f"{field.name} {option_text(theirs)} there, {option_text(ours)} here"
        if CHOICE in field.metadata:
            changed.append(f"{text}: {field.metadata[CHOICE].format(here)}")
        else:
            reason = field.metadata.get(REASON)
            different.append(f"{text} ({reason})" if reason else text)
    return BackboneComparison(tuple(different), tuple(changed))
