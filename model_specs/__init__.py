"""Backbone families, found by name. Neither torch nor Megatron is imported until a layer builds.

A family is one module of this package with two names: ``CONFIGS``, its named configurations, and
``build_backbone(name, config)``, which returns the chain. Dropping such a file here is all it
takes to add one. A family whose weights others publish has three names more: ``PUBLISHED_AS``, the
publishing class, ``published(config)``, which says how it stores them, and
``config_from_published(config)``, which reads its ``config.json``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published import Published
from model_specs._options import Config, Value, resolve, to_record, to_text

_NO_OPTIONS: Mapping[str, Value] = MappingProxyType({})

# Older folders call several models Transformer2DModel; diffusers tells them apart in the same way.
_CLASS_OF_NORM = {
    "ada_norm_zero": "DiTTransformer2DModel",
    "ada_norm_single": "PixArtTransformer2DModel",
}


@functools.cache
def _families() -> dict[str, ModuleType]:
    """Each configuration's name and the module of its family."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.ispkg or info.name.startswith("_"):
            continue
        family = importlib.import_module(f"{__name__}.{info.name}")
        for name in getattr(family, "CONFIGS", {}):
            if name in found:
                raise ValueError(f"{name!r} is defined by {found[name].__name__} and {info.name}")
            found[name] = family
    return found


def available() -> dict[str, Config]:
    """The named configurations of all families."""
    return {name: family.CONFIGS[name] for name, family in _families().items()}


def load_backbone(name: str, options: Mapping[str, Value] = _NO_OPTIONS) -> Backbone:
    """The chain of the configuration ``name`` with some of its fields overridden.

    ``options`` are fields of the family's config; strings are converted (``"320,640"``,
    ``"true"``, ``"none"``). ``record`` of the result rebuilds it:
    ``load_backbone(record["name"], record["options"])``. Raises ValueError for an unknown name
    (with close matches) or for faulty options (with all faults and the legal keys).
    """
    families = _families()
    if name not in families:
        close = difflib.get_close_matches(name, families, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no backbone is called {name!r}; {hint}available: {', '.join(sorted(families))}"
        )
    config = resolve(name, families[name].CONFIGS[name], options)
    backbone: Backbone = families[name].build_backbone(name, config)
    family = families[name].__name__.rpartition(".")[2]
    record = {"name": name, "family": family, "options": to_record(config)}
    return dataclasses.replace(backbone, record=record)


def changed_options(backbone: Backbone) -> dict[str, str]:
    """By which options, as flags take them, ``backbone`` differs from the one of its name."""
    named = to_record(available()[backbone.record["name"]])
    return {
        key: to_text(value)
        for key, value in backbone.record["options"].items()
        if named[key] != value
    }


def published_form(backbone: Backbone) -> Published | None:
    """How the library that published this backbone stores it; None if none did."""
    name = backbone.record["name"]
    family = _families()[name]
    if not hasattr(family, "published"):
        return None
    config = resolve(name, family.CONFIGS[name], backbone.record["options"])
    form: Published = family.published(config)
    return form


def load_published(config: Mapping[str, Any]) -> Backbone:
    """The backbone that a published ``config.json`` describes.

    Raises ValueError for a class that no family builds, and for settings that its family lacks.
    """
    wanted = config.get("_class_name")
    if wanted == "Transformer2DModel":
        wanted = _CLASS_OF_NORM.get(config.get("norm_type"), wanted)
    families = {
        family.PUBLISHED_AS: family
        for family in _families().values()
        if hasattr(family, "PUBLISHED_AS")
    }
    if wanted not in families:
        raise ValueError(
            f"no family builds {wanted!r}; known classes: {', '.join(sorted(families))}"
        )
    family = families[wanted]
    ours = family.config_from_published(config)
    record = to_record(ours)

    def distance(name: str) -> int:
        return sum(record[key] != value for key, value in to_record(family.CONFIGS[name]).items())

    return load_backbone(min(family.CONFIGS, key=distance), record)
