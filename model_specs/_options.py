"""Typed options of a backbone family: the fields of its frozen config dataclass.

Values come from flags (strings, ``key=value``), from Python, or from a checkpoint's record
(JSON). All faults of one set of options are reported together.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Protocol

Value = str | int | float | bool | None | tuple[int, ...] | list[int]


class Config(Protocol):
    """A family's configuration: a frozen dataclass of ints, bools, strings and tuples of ints."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]

    def faults(self) -> list[str]:
        """What is inconsistent between the fields; [] if nothing is."""
        ...


_KINDS: dict[Any, str] = {
    int: "int",
    bool: "true or false",
    str: "text",
    tuple[int, ...]: "ints, as in 320,640,1280",
    int | None: "int or none",
}


def resolve[C: Config](name: str, default: C, options: Mapping[str, Value]) -> C:
    """``default`` with ``options`` applied; raises one ValueError that lists every fault."""
    kinds = typing.get_type_hints(type(default))
    values: dict[str, Any] = {}
    faults = []
    for key, value in options.items():
        if key not in kinds:
            faults.append(f"{key}: no such option")
            continue
        try:
            values[key] = _convert(value, kinds[key])
        except ValueError:
            faults.append(f"{key}: expected {_KINDS[kinds[key]]}, got {value!r}")
    config = dataclasses.replace(default, **values)
    faults += config.faults()
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        legal = "".join(
            f"\n  {key} ({_KINDS[kinds[key]]}; default {to_text(getattr(default, key))})"
            for key in kinds
        )
        raise ValueError(
            f"options of backbone {name!r} have {len(faults)} fault(s):{lines}\n"
            f"legal options are:{legal}"
        )
    return config


def to_record(config: Config) -> dict[str, Any]:
    """All fields as JSON values (tuples become lists); ``resolve`` takes them back."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }


def to_text(value: object) -> str:
    """A value as flags take it: ``320,640``, ``true``, ``none``."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _convert(value: Value, kind: Any) -> Value:
    if kind is bool:
        return _to_bool(value)
    if kind is int:
        return _to_int(value)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError
        return value
    if kind == int | None:
        return None if value is None or str(value).lower() == "none" else _to_int(value)
    if kind == tuple[int, ...]:
        items = value.strip("()[]").split(",") if isinstance(value, str) else value
        return tuple(map(_to_int, items if isinstance(items, list | tuple) else [items]))
    raise TypeError(f"config fields of type {kind} are not supported")


def _to_bool(value: Value) -> bool:
    texts = {"true": True, "false": False, "1": True, "0": False}
    if str(value).lower() not in texts:
        raise ValueError
    return texts[str(value).lower()]


def _to_int(value: object) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise ValueError
    return int(value)
