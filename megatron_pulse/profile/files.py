"""JSON files of profiles: written atomically, read with all faults reported at once."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Set
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from megatron_pulse.errors import format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.json_validation import with_current_keys
from megatron_pulse.profile.layer_records import (
    LayerTimes,
    ProfiledConditioning,
    ProfiledLayer,
    ProfiledSkip,
    ShardSums,
)
from megatron_pulse.profile.profile import Profile, ProfileError

_FORMAT = "megatron_pulse profile 1"
_MOST_SUMS = 1000
"""Maximum sums over tensor-parallel ranks per layer, in older profiles."""
_OLDER: Mapping[type, set[str]] = {
    Profile: {"threads", "transformer_impl"},
    ProfiledLayer: {"optimizer_s", "sharded_time", "frozen_parameters", "needs_grad", "begins"},
    ShardSums: {"repeated_rows"},
    ProfiledSkip: {"needs_grad"},
    ProfiledConditioning: {"needs_grad"},
    LayerTimes: {
        *("split_forward_s", "split_input_grad_s", "split_weight_grad_s"),
        *("recompute_bytes", "passed_bytes", "forward_bytes", "wgrad_bytes"),
        *("selective_bytes", "selective_peak_bytes", "selective_s"),
        "halved_s",
    },
}
"""Fields that older profiles lack. A field of one record in a list is required in all."""
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

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
    """JSON object of a profile's file."""
    return {"format": _FORMAT, **dataclasses.asdict(profile)}


def from_record(record: Mapping[str, Any], where: str | Path) -> Profile:
    """Profile from an object as of ``to_record``; raises ProfileError with all faults
    of ``where``.
    """
    if record.get("format") != _FORMAT:
        raise ProfileError(f"{where} is not a profile: its 'format' is not {_FORMAT!r}")
    faults: list[str] = []
    rest = {name: value for name, value in record.items() if name != "format"}
    profile = _read(Profile, rest, "", faults)
    if not faults:
        try:
            return Profile(**profile)
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from error
    raise ProfileError(format_faults(f"{where} is not a sound profile", faults))


def _read(
    kind: Any, value: Any, where: str, faults: list[str], said: Set[str] = frozenset()
) -> Any:
    """Convert a JSON ``value`` to ``kind``; a Profile to its fields, since its own checks come
    last.

    ``said`` names the fields that this record or another of its list has.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where, faults, said)
    if origin is tuple:
        if isinstance(value, list):
            each = arguments[0]
            items = [with_current_keys(item, _FORMER_NAMES.get(each, {})) for item in value]
            said = set().union(*(item.keys() for item in items if isinstance(item, dict)))
            return tuple(_read(each, v, f"{where}[{i}]", faults, said) for i, v in enumerate(items))
        faults.append(f"{where}: expected a list, got {_short(value)}")
    elif origin is Mapping:
        if isinstance(value, dict):
            return {
                _read_key(arguments[0], key, where, faults): (
                    v if arguments[1] is Any else _read(arguments[1], v, f"{where}[{key}]", faults)
                )
                for key, v in value.items()
            }
        faults.append(f"{where}: expected an object, got {_short(value)}")
    elif origin is UnionType:
        (given,) = (one for one in arguments if one is not NoneType)
        return None if value is None else _read(given, value, where, faults, said)
    elif issubclass(kind, StrEnum):
        if value in list(kind):
            return kind(value)
        faults.append(f"{where}: expected one of {', '.join(kind)}, got {_short(value)}")
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    else:
        faults.append(f"{where}: expected {_KINDS[kind]}, got {_short(value)}")
    return None


def _read_record(kind: Any, value: Any, where: str, faults: list[str], said: Set[str]) -> Any:
    if not isinstance(value, dict):
        faults.append(f"{where}: expected an object, got {_short(value)}")
        return None
    sums = value.get("shard_sums")
    if kind is ProfiledLayer and type(sums) is int and 0 <= sums <= _MOST_SUMS:
        value = {**value, "shard_sums": _sums_of_boundaries(value)}
    kinds = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    older = _OLDER.get(kind, set()) - said
    missing = [name for name in kinds if name not in {*value, *older}]
    faults += [f"{prefix}{name} is missing" for name in missing]
    faults += [f"{prefix}{name} is unknown" for name in value if name not in kinds]
    before = len(faults)
    read = {
        name: _read(kinds[name], value[name], f"{prefix}{name}", faults)
        for name in kinds
        if name in value
    }
    if kind is Profile:
        return read
    complete = len(faults) == before and not missing
    return kind(**read) if complete else None


def _sums_of_boundaries(layer: dict[str, Any]) -> dict[str, Any]:
    """Sums of an older profile: a number of sums, each of the boundary's size."""
    sums = [layer.get("boundary_bytes", 0)] * layer["shard_sums"]
    return {"rows": sums, "columns": sums, "contexts": []}


def _read_key(kind: Any, key: str, where: str, faults: list[str]) -> Any:
    if kind is str:
        return key
    if key.isascii() and key.isdigit():
        return int(key)
    faults.append(f"{where}: expected whole numbers as keys, got {key!r}")
    return None


def _short(value: Any) -> str:
    if isinstance(value, str | int | float | bool | NoneType):
        return json.dumps(value)[:40]
    return "a list" if isinstance(value, list) else "an object"
