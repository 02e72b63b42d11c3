"""JSON files of profiles: written atomically, read with all faults reported at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.build_context import LOCAL
from megatron_pulse.errors import Faults, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.json_validation import validated, with_current_keys
from megatron_pulse.profile.context_costs import LayerContextCosts
from megatron_pulse.profile.layer_records import (
    LayerTimes,
    ProfiledConditioning,
    ProfiledLayer,
    ProfiledSkip,
)
from megatron_pulse.profile.profile import Profile, ProfileError

_FORMAT = "megatron_pulse profile 1"
_MOST_SUMS = 1000
"""Maximum sums over tensor-parallel ranks per layer, in older profiles."""
_OLDER: Mapping[type, Mapping[str, Any]] = {
    Profile: {
        **{"threads": 0, "transformer_impl": LOCAL, "token_slices": 1, "sliced": {}},
        **{"shapes": [], "kinds": {}, "context": None, "sliced_context": {}},
    },
    ProfiledLayer: {
        **{"optimizer_s": 0.0, "sharded_time": 1.0, "frozen_parameters": 0},
        **{"needs_grad": True, "begins": False},
        **{"quantized_parameters": 0, "quantized_bytes": 0, "offloaded": False},
    },
    ProfiledSkip: {"needs_grad": True},
    ProfiledConditioning: {"needs_grad": True},
    LayerTimes: {
        field.name: field.default
        for field in dataclasses.fields(LayerTimes)
        if field.default is not dataclasses.MISSING
    },
    LayerContextCosts: {"ring_bytes": 0},
}
"""Fields that older profiles lack, with their values."""

_FORMER_NAMES: Mapping[type, Mapping[str, str]] = {
    ProfiledLayer: {"wants": "needs_grad"},
    ProfiledSkip: {"wants": "needs_grad"},
    ProfiledConditioning: {"wants": "needs_grad"},
    LayerTimes: {"recompute_bytes": "recompute_bytes", "wgrad_bytes": "wgrad_bytes"},
}
"""Keys of older profiles with today's names, by record."""


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write ``profile``; an existing file is only replaced by a complete one."""
    write_with_checksum(path, json.dumps(to_record(profile), indent=1) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Read a file of ``save_profile``; raises ProfileError listing every fault."""
    try:
        record = read_json(path, FileKind.PROFILE)
    except FileError as error:
        raise ProfileError(str(error)) from error
    return from_record(record, path)


def to_record(profile: Profile) -> dict[str, Any]:
    """JSON object of a profile's file, without shapes, kinds, slices and ``context`` if there are
    none.
    """
    record = {"format": _FORMAT, **dataclasses.asdict(profile)}
    for owner in (record, *record["shapes"]):
        if owner["context"] is None:
            del owner["context"]
    for name in ("shapes", "kinds", "sliced", "sliced_context"):
        if not record[name]:
            del record[name]
    if profile.token_slices == 1:
        del record["token_slices"]
    return record


def from_record(record: Mapping[str, Any], where: str | Path) -> Profile:
    """Profile from an object as of ``to_record``; raises ProfileError with all faults
    of ``where``.
    """
    if record.get("format") != _FORMAT:
        raise ProfileError(f"{where} is not a profile: its 'format' is not {_FORMAT!r}")
    faults = []
    found = _with_current_form(record)
    if isinstance(times := found.get("times"), dict):
        wrong = [key for key in times if not (key.isascii() and key.isdigit())]
        faults = [f"times.{key} is a key; allowed is a whole number" for key in wrong]
        found["times"] = {key: row for key, row in times.items() if key not in wrong}
    try:
        profile = validated(Profile, found, complete=True)
    except Faults as error:
        faults += error.faults
    except ProfileError as error:
        if not faults:
            raise ProfileError(f"{where}: {error}") from error
    if faults:
        raise ProfileError(format_faults(f"{where} is not a sound profile", faults))
    return profile


def _with_current_form(record: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a profile's file, with what older versions lacked or called otherwise.

    A field that one record of a list has is required in all.
    """
    found = {**_OLDER[Profile], **record}
    del found["format"]
    if isinstance(shapes := found["shapes"], list):
        found["shapes"] = [
            {"context": None, **row} if isinstance(row, dict) else row for row in shapes
        ]
    owners = [found, *(row for row in found["shapes"] if isinstance(row, dict))]
    for owner in owners:
        if isinstance(costs := owner["context"], dict):
            owner["context"] = dict(costs)
    lists: list[tuple[type, dict[str, Any], str]] = []
    for owner in owners:
        lists += [
            (ProfiledLayer, owner, "layers"),
            (ProfiledSkip, owner, "skips"),
            (ProfiledConditioning, owner, "conditioning"),
        ]
        if isinstance(costs := owner["context"], dict):
            lists.append((LayerContextCosts, costs, "layers"))
        if isinstance(times := owner.get("times"), dict):
            owner["times"] = dict(times)
            lists += [(LayerTimes, owner["times"], size) for size in times]
    for kind, owner, key in lists:
        if isinstance(rows := owner.get(key), list):
            rows = [with_current_keys(row, _FORMER_NAMES.get(kind, {})) for row in rows]
            given = set().union(*(row.keys() for row in rows if isinstance(row, dict)))
            older = {name: value for name, value in _OLDER[kind].items() if name not in given}
            owner[key] = [{**older, **row} if isinstance(row, dict) else row for row in rows]
    for layer in found["layers"] if isinstance(found.get("layers"), list) else ():
        if isinstance(layer, dict) and (sums := _shard_sums(layer)) is not None:
            layer["shard_sums"] = sums
    return found


def _shard_sums(layer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sums of an older profile, with what it lacks; None if they are no sums.

    The oldest have a number of sums, each of the boundary's size.
    """
    sums = layer.get("shard_sums")
    if type(sums) is int and 0 <= sums <= _MOST_SUMS:
        each = [layer.get("boundary_bytes", 0)] * sums
        sums = {"rows": each, "columns": each, "contexts": []}
    return {"repeated_rows": None, **sums} if isinstance(sums, dict) else None
