"""The memory format of convolutions: what a profile found faster, unless a run says otherwise.

Which it is, is an option of the families that have convolutions. Where nobody gives it, a profile
that is measured decides, and its record, and a plan's, say what it decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTION = "channels_last"


def in_format_of(
    record: Mapping[str, Any], name: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options ``given`` for a backbone ``name``; where they leave the memory format open, it is
    that of ``record``, if that is of the same backbone."""
    theirs = record.get("options", {})
    if record.get("name") != name or OPTION not in theirs:
        return dict(given)
    return {OPTION: theirs[OPTION], **given}


def in_given_format(record: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A backbone's ``record``, in the memory format that the options ``given`` say, if they do."""
    options = record.get("options", {})
    if OPTION not in given or OPTION not in options:
        return dict(record)
    return {**record, "options": {**options, OPTION: given[OPTION]}}


def format_of(record: Mapping[str, Any]) -> str:
    """How the convolutions of a backbone's ``record`` lie in memory; empty where it has none."""
    chosen = record.get("options", {}).get(OPTION)
    return "" if chosen is None else "channels_last" if chosen else "contiguous"


def format_caution(record: Mapping[str, Any], run: Mapping[str, Any], by: str) -> str:
    """That a run's convolutions are in another memory format than those that ``by`` measured;
    empty where they are not. Both are records of backbones."""
    theirs, ours = format_of(record), format_of(run)
    if not theirs or not ours or theirs == ours:
        return ""
    return (
        f"{by} is of {theirs} convolutions, the run's are {ours}: their times are others; leave "
        f"out --pulse-option {OPTION}, or profile with --option "
        f"{OPTION}={str(ours == 'channels_last').lower()}"
    )
