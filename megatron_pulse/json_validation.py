"""JSON schemas whose faults name the place and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from megatron_pulse.errors import LOOKED_FOR, did_you_mean, first_of

COUNT: dict[str, Any] = {
    "type": "integer",
    "minimum": 1,
    "description": "a whole number, 1 or more",
}


NATURAL: dict[str, Any] = {
    "type": "integer",
    "minimum": 0,
    "description": "a whole number, 0 or more",
}
TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "description": "text"}
FLAG: dict[str, Any] = {"type": "boolean", "description": "true or false"}
OPERATION: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[FBIWROLX](0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,8})$",
    "description": "an operation such as F2:0",
}
OBJECT: dict[str, Any] = {"type": "object", "description": "an object"}


def one_of(values: list[str]) -> dict[str, Any]:
    """Schema of one of these texts."""
    return {"enum": values, "description": f"one of {', '.join(values)}"}


def list_of(items: dict[str, Any], description: str, least: int = 1) -> dict[str, Any]:
    """Schema of a list of ``least`` items or more."""
    return {"type": "array", "items": items, "minItems": least, "description": description}


def table_of(values: dict[str, Any], description: str) -> dict[str, Any]:
    """Schema of an object with any keys."""
    return {"type": "object", "additionalProperties": values, "description": description}


def number(description: str, **limits: float) -> dict[str, Any]:
    """Schema of a number, above 0 unless ``limits`` are given."""
    return {"type": "number", "description": description, **(limits or {"exclusiveMinimum": 0})}


def record(
    description: str, required: list[str] | None = None, **properties: Any
) -> dict[str, Any]:
    """Schema of an object with exactly these properties; without ``required`` all are required."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def faults_of(schema: dict[str, Any], value: Any) -> list[str]:
    """All faults of ``value``; every part of ``schema`` needs a description of allowed values."""
    errors = _VALIDATOR(schema).iter_errors(value)
    ordered = sorted(islice(errors, LOOKED_FOR + 1), key=lambda e: list(map(_in_order, e.path)))
    return first_of(line for error in ordered for line in _lines(error))


def _in_order(part: str | int) -> str:
    """Sort key that orders list indices numerically."""
    return f"{part:012d}" if isinstance(part, int) else part


def _is_number(_: Any, value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


_VALIDATOR = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": lambda _, value: type(value) is int}
    ),
)


def _lines(error: ValidationError) -> Iterator[str]:
    where = ".".join(map(str, error.absolute_path))
    properties: dict[str, Any] = error.schema.get("properties", {})
    if error.validator == "required":  # one error per name, but only the message contains the name
        prefix = f"{where}." if where else ""
        name = next(n for n in error.validator_value if error.message.startswith(repr(n)))
        yield f"{prefix}{name} is missing; allowed is {properties[name]['description']}"
    elif error.validator == "additionalProperties":
        prefix = f"{where}." if where else ""
        for name in error.instance:
            if name not in properties:
                like = did_you_mean(name, properties)
                yield f"{prefix}{name} is unknown; {like}allowed are {', '.join(properties)}"
    else:
        shown = repr(error.instance)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        yield f"{where or 'the file'} is {shown}; allowed is {error.schema['description']}"


def with_current_keys(record: Any, former: Mapping[str, str]) -> Any:
    """``record`` of an older file with today's names for its keys; ``former`` maps old to new.

    A record with both names of a value keeps both: the old one is then unknown.
    """
    if not isinstance(record, dict):
        return record
    return {
        key if former.get(key, key) in record else former.get(key, key): value
        for key, value in record.items()
    }
