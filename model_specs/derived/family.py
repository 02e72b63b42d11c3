"""Family made for one name with a colon: typed options, a chain, and a record."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import Published
from model_specs.common.options import FamilyConfig, run_choice
from model_specs.common.sample_sizes import PATCHWISE

DTYPE = "dtype"
"""Option for the dtype of module export; a choice of the run, not part of the model."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DerivedFamily:
    """Family interface of ``model_specs``, made for one name.

    ``family`` and ``recorded`` are the names in records; ``recorded`` may differ from the given
    name. ``kept`` holds settings without effect here (see ``Backbone``).
    """

    family: str
    recorded: str
    config: FamilyConfig
    build: Callable[[FamilyConfig], Backbone]
    publish: Callable[[FamilyConfig], Published | None] = lambda config: None
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def CONFIGS(self) -> dict[str, FamilyConfig]:
        """See ``model_specs``."""
        return {self.recorded: self.config}

    def build_backbone(self, name: str, config: FamilyConfig) -> Backbone:
        """See ``model_specs``."""
        return dataclasses.replace(self.build(config), name=self.recorded, kept=self.kept)

    def published(self, config: FamilyConfig) -> Published | None:
        """See ``model_specs``."""
        return self.publish(config)


class ModuleOptions:
    """Base class of the options made for one name."""

    UNSUPPORTED = MappingProxyType(
        {PATCHWISE: "traced modules take no places of patches. Train a UNet, DiT, PixArt or SD3"}
    )

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        found = []
        if (dtype := getattr(self, DTYPE, DTYPES[0])) not in DTYPES:
            found.append(f"{DTYPE}: {dtype!r} is none of {', '.join(DTYPES)}")
        return found


def options_class(
    name: str, identity: Mapping[str, Any], choices: Mapping[str, tuple[Any, Any, str]]
) -> type[Any]:
    """Config class with the fields of ``identity`` and the run ``choices``.

    ``identity`` maps names to defaults. ``choices`` maps names to (type, default, effect).
    """
    fields: list[tuple[str, Any, Any]] = [
        (key, Any, dataclasses.field(default_factory=functools.partial(copy.deepcopy, value)))
        for key, value in identity.items()
    ]
    fields += [
        (key, kind, run_choice(value, effect)) for key, (kind, value, effect) in choices.items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=(ModuleOptions,), frozen=True)
