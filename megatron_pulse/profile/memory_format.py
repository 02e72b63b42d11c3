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


def format_caution(record: Mapping[str, Any], run: Mapping[str, Any], by: str) -> str:
    """That a run's convolutions are in another memory format than those that ``by`` measured;
    empty where they are not. Both are records of backbones."""
    theirs, ours = (backbone.get("options", {}).get(OPTION) for backbone in (record, run))
    if theirs is None or ours is None or theirs == ours:
        return ""
    named = {True: "channels_last", False: "contiguous"}
    return (
        f"{by} is of {named[theirs]} convolutions, the run's are {named[ours]}: their times are "
        f"others; leave out --pulse-option {OPTION}, or profile with "
        f"--option {OPTION}={str(ours).lower()}"
    )
