"""Selection of layers by name patterns, for recomputation and activation offload."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from megatron_pulse.errors import Faults, unmatched_patterns


def name_of(record: Mapping[str, Any]) -> str:
    """Name of a backbone's record, or of the record of a layer table."""
    return str(record.get("name") or record.get("table") or "the profile")


def matching_layers(names: Sequence[str], patterns: Collection[str]) -> frozenset[int]:
    """Indices of the layers whose names match one of ``patterns`` (fnmatch's).

    Raises Faults (a ValueError) listing patterns without a match.
    """
    found = frozenset(
        i for i, name in enumerate(names) if any(fnmatchcase(name, p) for p in patterns)
    )
    if faults := unmatched_patterns(patterns, names, "layer"):
        raise Faults(faults)
    return found


def tell_layers(layers: Collection[int], count: int) -> str:
    """Short text for ``layers`` of ``count``: ``none``, ``all``, ``0-3, 7``."""
    if len(layers) in (0, count):
        return "all" if layers else "none"
    told = []
    for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        first, *rest = (layer for _, layer in run)
        told.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ", ".join(told)


_CLASSES = ("num_classes", "num_class_embeds", "num_embeds_ada_norm")
_SIZES = (("height", "width"), ("sample_size",), ("image_size",))


def class_option(record: Mapping[str, Any]) -> str:
    """The name of the option that says how many classes a recorded backbone knows; empty where
    it has none."""
    return next((name for name in _CLASSES if name in record.get("options", ())), "")


def size_options(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the options for the size of a recorded backbone's samples; none where it has
    none."""
    has = set(record.get("options", ()))
    return next((names for names in _SIZES if set(names) <= has), ())
