"""Backbones, options and layers by name: which layers compute activations again, or keep them on
the host, until the backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from megatron_pulse.faults import Faults, unmatched


def name_of(record: Mapping[str, Any]) -> str:
    """What a backbone's record, or that of a table of layers, is called."""
    return str(record.get("name") or record.get("table") or "the profile")


def matching_layers(names: Sequence[str], patterns: Collection[str]) -> frozenset[int]:
    """The layers, of a chain with these ``names``, that match one of ``patterns`` (fnmatch's).

    Raises Faults (a ValueError) with every pattern that matches none.
    """
    found = frozenset(
        i for i, name in enumerate(names) if any(fnmatchcase(name, p) for p in patterns)
    )
    if faults := unmatched(patterns, names, "layer"):
        raise Faults(faults)
    return found


def tell_layers(layers: Collection[int], count: int) -> str:
    """``layers`` of ``count`` in a word or two: ``none``, ``all``, ``0-3, 7``."""
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
