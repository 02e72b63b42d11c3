"""Typed options of a backbone family: the fields of its frozen config dataclass.

Values come from flags (strings, ``key=value``), from Python, or from a checkpoint's record
(JSON). All faults of one set of options are reported together.

A field is part of a model's identity unless it is declared otherwise: by ``run_choice``, or by
``settled_by``, whose None leaves it to the checkpoint that a run continues.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_pulse.faults import Carried, meant, told
from megatron_pulse.flag_fields import flag_value

Value = str | int | float | bool | None | tuple[int, ...] | list[int]
"""Of the fields of a family; a module's settings may be any JSON."""

_MOST, _MOST_LAYERS = 10_000_000, 1_000

CHOICE, SETTLED_BY, REASON = "choice", "settled_by", "reason"
"""Keys of a field's metadata: what ``run_choice``, ``settled_by`` and ``fixed`` say."""

RESPACED = "positions are computed at {0.sample_size}, spaced as for {0.base_size}"
"""The effect of another ``sample_size`` where positions span what ``base_size`` has."""


def run_choice(default: Any, effect: str) -> Any:
    """A field that each run may choose: a model's weights serve any value of it.

    ``effect`` says what another value changes, in words formatted with the config (``{0.side}``).
    """
    return dataclasses.field(default=default, metadata={CHOICE: effect})


def settled_by(name: str) -> Any:
    """A field whose None stands for the property ``name`` in a new model.

    In one that continues a checkpoint it stands for what it was there.
    """
    return dataclasses.field(default=None, metadata={SETTLED_BY: name})


def fixed(default: Any, reason: str) -> Any:
    """A field that looks like a run's choice and is none; ``reason`` says why."""
    return dataclasses.field(default=default, metadata={REASON: reason})


class FamilyConfig(Protocol):
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
    float | None: "number or none",
    Any: "text or JSON",
}


def require_config(config: Any) -> None:
    """Raise TypeError unless ``config`` is of the form that options are read into."""
    if not dataclasses.is_dataclass(config) or not callable(getattr(config, "faults", None)):
        raise TypeError("a configuration must be a dataclass with a method faults()")
    for key, kind in typing.get_type_hints(type(config)).items():
        if kind not in _KINDS:
            known = ", ".join(sorted(map(_name_of, _KINDS)))
            raise TypeError(f"{key} is of type {_name_of(kind)}, options are of {known}")


def _name_of(kind: Any) -> str:
    return kind.__name__ if type(kind) is type else str(kind)


class OptionError(Carried, ValueError):
    """Options that make no backbone; ``faults`` lists why."""

    def __init__(self, message: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(message)


def resolve[C: FamilyConfig](name: str, default: C, options: Mapping[str, Value]) -> C:
    """``default`` with ``options`` applied; raises one OptionError that lists every fault."""
    kinds = typing.get_type_hints(type(default))
    values: dict[str, Any] = {}
    faults = []
    all_shown = False  # a name that is like no option gets the whole list
    for key, value in options.items():
        if key not in kinds:
            near = meant(key, kinds)
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
            f"\n  {key} ({_KINDS[kinds[key]]}; default {flag_value(getattr(default, key))})"
            for key in kinds
        )
        what = f"options of backbone {name!r}"
        raise OptionError(told(what, faults, legal if all_shown else ""), faults)
    return config


def to_record(config: FamilyConfig) -> dict[str, Any]:
    """All fields as JSON values (tuples become lists); ``resolve`` takes them back."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }


def _size_fault(key: str, value: Value) -> str | None:
    """Why no model has numbers like these: building its chain would not end."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    most = _MOST_LAYERS if "layers" in key or "depth" in key else _MOST
    if all(isinstance(n, bool) or not isinstance(n, int) or abs(n) <= most for n in numbers):
        return None
    return f"{key}: {flag_value(value)[:60]} is beyond {most:,}"


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
    """``32,64`` is a list, ``none`` is nothing; what is no JSON is text."""
    if "," in text and text[0] not in '[{"':
        return [_to_json(part) for part in text.split(",")]
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def json_value(value: object) -> str:
    """A value of any JSON as flags take it: text as it is, unless it would be read otherwise."""
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
