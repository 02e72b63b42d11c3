"""Typed options of a backbone family: the fields of its frozen config dataclass.

Values come from flags (strings, ``key=value``), from Python, or from a checkpoint's record (JSON).
All faults of one set of options are reported together.

A field is part of a model's identity by default. ``run_choice`` declares a choice of the run.
``settled_by`` declares a field whose None follows the checkpoint that a run continues.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_pulse.dataclass_flags import flag_value
from megatron_pulse.errors import PicklableError, did_you_mean, format_faults

Value = str | int | float | bool | None | tuple[int, ...] | list[int]
"""Type of an option's value; a module's settings may be any JSON."""

_MOST, _MOST_LAYERS = 10_000_000, 1_000

CHOICE, SETTLED_BY, REASON = "choice", "settled_by", "reason"
"""Metadata keys of a field, set by ``run_choice``, ``settled_by`` and ``fixed``."""

RESPACED = "positions are computed at {0.sizes_text}, with the spacing of {0.base_size}"
"""Effect of other sizes if positions span ``base_size``."""


def run_choice(default: Any, effect: str) -> Any:
    """Field that each run may choose; the same weights serve any value.

    ``effect`` describes the consequence of another value, formatted with the config (``{0.side}``).
    """
    return dataclasses.field(default=default, metadata={CHOICE: effect})


def settled_by(name: str) -> Any:
    """Field whose None stands for the property ``name`` in a new model.

    In a model that continues a checkpoint, None stands for the checkpoint's value.
    """
    return dataclasses.field(default=None, metadata={SETTLED_BY: name})


def fixed(default: Any, reason: str) -> Any:
    """Field that resembles a run choice but is part of the model; ``reason`` explains why."""
    return dataclasses.field(default=default, metadata={REASON: reason})


class FamilyConfig(Protocol):
    """A family's configuration: a frozen dataclass of ints, bools, strings and tuples of ints.

    An attribute ``UNSUPPORTED`` maps options of other families to the reason why this one has none.
    """

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each; [] if there are none."""
        ...


_KINDS: dict[Any, str] = {
    int: "int",
    bool: "true or false",
    str: "text",
    tuple[int, ...]: "ints, as in 320,640,1280",
    int | None: "int or none",
    float | None: "number or none",
    Any: "text or JSON",
}


def require_config(config: Any) -> None:
    """Raise TypeError unless ``config`` is a dataclass with options of supported types."""
    if not dataclasses.is_dataclass(config) or not callable(getattr(config, "faults", None)):
        raise TypeError("a configuration must be a dataclass with a method faults()")
    for key, kind in typing.get_type_hints(type(config)).items():
        if kind not in _KINDS:
            known = ", ".join(sorted(map(_name_of, _KINDS)))
            raise TypeError(f"{key} is of type {_name_of(kind)}; options must be of {known}")


def _name_of(kind: Any) -> str:
    return kind.__name__ if type(kind) is type else str(kind)


class OptionError(PicklableError, ValueError):
    """Invalid options; ``faults`` lists the reasons."""

    def __init__(self, message: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(message)


def resolve[C: FamilyConfig](name: str, default: C, options: Mapping[str, Value]) -> C:
    """``default`` with ``options`` applied; raises one OptionError that lists every fault."""
    kinds = typing.get_type_hints(type(default))
    unsupported: Mapping[str, str] = getattr(default, "UNSUPPORTED", {})
    values: dict[str, Any] = {}
    faults = []
    all_shown = False  # an unmatched name gets the whole list of options
    for key, value in options.items():
        if key not in kinds and key in unsupported:
            faults.append(f"{key}: unsupported: {unsupported[key]}")
            continue
        if key not in kinds:
            near = did_you_mean(key, kinds)
            all_shown = all_shown or not near
            faults.append(f"{key[:60]}: no such option; {near}".rstrip("; "))
            continue
        try:
            values[key] = _convert(value, kinds[key])
        except ValueError:
            faults.append(f"{key}: expected {_KINDS[kinds[key]]}, got {repr(value)[:60]}")
            continue
        if fault := _size_fault(key, values[key]):
            faults.append(fault)
            del values[key]
    config = dataclasses.replace(default, **values)
    faults += config.faults()
    if faults:
        legal = "legal options are:" + "".join(
            f"\n  {key} ({_KINDS[kinds[key]]}; default {option_text(getattr(default, key))})"
            for key in kinds
        )
        what = f"options of backbone {name!r}"
        raise OptionError(format_faults(what, faults, legal if all_shown else ""), faults)
    return config


def option_text(value: object) -> str:
    """Value of an option in messages."""
    return flag_value(value) or "empty"


def to_record(config: FamilyConfig) -> dict[str, Any]:
    """All fields as JSON values (tuples become lists); ``resolve`` takes them back."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }


def _size_fault(key: str, value: Value) -> str | None:
    """Fault of a number too large to build a chain in finite time, or None."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    most = _MOST_LAYERS if "layers" in key or "depth" in key else _MOST
    if all(isinstance(n, bool) or not isinstance(n, int) or abs(n) <= most for n in numbers):
        return None
    return f"{key}: {flag_value(value)[:60]} exceeds {most:,}"


def _convert(value: Value, kind: Any) -> Value:
    if kind is Any:
        return _to_json(value) if isinstance(value, str) else value
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
    if kind == float | None:
        return None if value is None or str(value).lower() == "none" else _to_float(value)
    if kind == tuple[int, ...]:
        items = value.strip("()[]").split(",") if isinstance(value, str) else value
        return tuple(map(_to_int, items if isinstance(items, list | tuple) else [items]))
    raise TypeError(f"config fields of type {kind} are not supported")


def _to_json(text: str) -> Any:
    """Parse ``32,64`` as a list, ``none`` as None, and text that is not JSON as a string."""
    if "," in text and text[0] not in '[{"':
        return [_to_json(part) for part in text.split(",")]
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def json_value(value: object) -> str:
    """Flag text of any JSON value; a string is quoted only if parsing would change it."""
    if isinstance(value, str):
        return value if _to_json(value) == value else json.dumps(value)
    return json.dumps(value, separators=(",", ":"))


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


def _to_float(value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number
