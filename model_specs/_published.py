"""What families share in reading published ``config.json`` files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pulse.faults import told


def require_settings(
    config: Mapping[str, Any], required: Mapping[str, Any], more: Sequence[str] = ()
) -> None:
    """Raise a ValueError that lists every setting of ``config`` that is not as ``required``.

    ``required`` are the library's defaults: a setting that is absent is as required. ``more`` are
    faults that the caller found.
    """
    faults = [
        f"{key} is {config[key]!r}, only {value!r} is implemented"
        for key, value in required.items()
        if key in config
        and (config[key] != value or isinstance(config[key], bool) != isinstance(value, bool))
    ]
    faults += more
    if faults:
        what = config.get("_class_name", "the published configuration")
        raise ValueError(told(f"{what} has settings that no family implements", faults))
