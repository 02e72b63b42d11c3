"""Memory format of convolutions, taken from a profile unless a run overrides it.

The format is an option of families with convolutions. Without a given option, a measured profile
decides. The records of profile and plan contain the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTION = "channels_last"


def in_format_of(
    record: Mapping[str, Any], name: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Options ``given`` for a backbone ``name``, with the memory format of ``record`` as default.

    The default applies only if ``record`` is of the same backbone.
    """
    theirs = record.get("options", {})
    if record.get("name") != name or OPTION not in theirs:
        return dict(given)
    return {OPTION: theirs[OPTION], **given}


def in_given_format(record: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A backbone's ``record``, with the memory format from the options ``given``, if any."""
    options = record.get("options", {})
    if OPTION not in given or OPTION not in options:
        return dict(record)
    return {**record, "options": {**options, OPTION: given[OPTION]}}


def format_of(record: Mapping[str, Any]) -> str:
    """Memory format of the convolutions in a backbone's ``record``; empty without convolutions."""
    chosen = record.get("options", {}).get(OPTION)
    return "" if chosen is None else "channels_last" if chosen else "contiguous"


def format_caution(record: Mapping[str, Any], run: Mapping[str, Any], by: str) -> str:
    """Warning that a run's memory format differs from the one ``by`` measured; empty if equal.

    Both arguments are backbone records.
    """
    theirs, ours = format_of(record), format_of(run)
    if not theirs or not ours or theirs == ours:
        return ""
    return (
        f"{by} has {theirs} convolutions, the run {ours}: times will differ. Leave out "
        f"--pulse-option {OPTION}, or profile with --option "
        f"{OPTION}={str(ours == 'channels_last').lower()}"
    )
