"""Sample sizes among the options of a recorded backbone, and their replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.layer_selection import size_options

SIZES = frozenset({"height", "width", "buckets"})
"""Options for the sizes of a run's samples, which are not part of the model."""
GIVES_SIZE = frozenset({*SIZES, "sample_size"})
"""Options that replace the recorded ``SIZES``."""


def options_at_size(record: Mapping[str, Any], height: int, width: int) -> dict[str, str]:
    """Options for samples of this height and width, of a recorded backbone.

    Videos keep the frames of the first recorded bucket. Raises ValueError for a backbone without
    such options.
    """
    options = record["options"].keys()
    if {"height", "width"} <= options:
        sizes = {"height": str(height), "width": str(width)}
        if "frames" in options and (buckets := record["options"].get("buckets")):
            sizes["frames"] = str(buckets).split("x")[0]
        return sizes
    if "buckets" in options:
        return {"buckets": f"{height}x{width}"}
    named = ", ".join(size_options(record)) or "none"
    raise ValueError(
        f"{record['name']} has no option for a height and width (options of its size: {named})"
    )


def with_options(recorded: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Recorded options with those ``given``; a given size replaces all recorded ones."""
    replaced = SIZES if given.keys() & GIVES_SIZE else frozenset()
    return {**{key: value for key, value in recorded.items() if key not in replaced}, **given}
