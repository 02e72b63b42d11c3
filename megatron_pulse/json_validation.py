"""Validation of JSON values by type annotations; faults name the place and the allowed values.

Types are dataclasses and typed dictionaries, validated by pydantic. ``Annotated`` adds limits
(of ``annotated_types``) and a text: the meaning of a number, or the description of another type.

    @dataclass(frozen=True)
    class Link:
        kind: Annotated[str, OneOf(("nvlink", "pcie"))]
        latency_us: Annotated[float, Ge(0), Le(1e9), "microseconds of an empty message"]

    faults_of(Link, {"kind": "x", "latency_us": -1})
    # kind is 'x'; allowed is one of nvlink, pcie
    # latency_us is -1; allowed is a number from 0 to 1e9: microseconds of an empty message
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, MinLen

from megatron_pulse.errors import Faults, did_you_mean, first_of

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Text = Annotated[str, MinLen(1)]
Item = TypeVar("Item")
Some = Annotated[tuple[Item, ...], MinLen(1)]
"""A list that is not empty."""


_OPEN_ENDED: set[Any] = set()
_LARGE = 100_000
_ONE_EACH = f"and maybe more: of a file of over {_LARGE:,} values, a list shows its first fault"
"""A fault takes a kilobyte, so those of a large file could fill the memory."""


@dataclass(frozen=True)
class Matching:
    """Limit of a text: it contains a match of ``pattern``."""

    pattern: str


@dataclass(frozen=True)
class OneOf:
    """Limit of a text: it is one of ``names``."""

    names: tuple[str, ...]


OperationText = Annotated[
    str,
    Matching(r"^[FBIWROLX](0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,8})$"),
    "an operation such as F2:0",
]


def open_ended[Kind](kind: type[Kind]) -> type[Kind]:
    """Typed dictionary that may have further keys."""
    _OPEN_ENDED.add(kind)
    return kind


def validated[Kind](kind: type[Kind], value: Any, *, complete: bool = False) -> Kind:
    """``value`` as an object of ``kind``; raises Faults with all faults.

    If only the own checks of a dataclass fail, their error is raised as it is. With ``complete``
    every field of a dataclass is required, also those with a default.
    """
    from pydantic_core import ValidationError  # slow to import

    try:
        text = json.dumps([value])
    except (TypeError, ValueError) as error:
        raise Faults([f"it is not JSON: {error}"]) from error
    is_large = text.count(",") > _LARGE
    try:
        found: tuple[Kind] = _validator(cast(Any, kind), complete, is_large).validate_json(text)
    except ValidationError as error:
        (given,) = json.loads(text)
        errors = error.errors(include_url=False, include_input=False)
        own = [each["ctx"]["error"] for each in errors if each["type"] == "value_error"]
        if len(own) == len(errors):
            raise own[0] from None
        faults = first_of(_faults(kind, given, errors))
        raise Faults(faults + [_ONE_EACH] * is_large) from error
    return found[0]


def faults_of(kind: Any, value: Any, *, complete: bool = False) -> list[str]:
    """All faults of ``value`` as a ``kind`` (see ``validated``)."""
    try:
        validated(kind, value, complete=complete)
    except Faults as error:
        return error.faults
    return []


@cache
def _validator(kind: Any, complete: bool, one_each: bool) -> Any:
    from pydantic_core import SchemaValidator, core_schema

    # pydantic itself takes dataclasses too, but its import is slow.
    return SchemaValidator(_Conversion(core_schema, complete, one_each).of(tuple[kind]))


@dataclass(frozen=True)
class _Conversion:
    """Types as schemas of pydantic's ``core``.

    With ``complete`` dataclasses have no defaults, with ``one_each`` a list ends at a fault.
    """

    core: Any
    complete: bool
    one_each: bool

    def of(self, kind: Any) -> Any:
        core, notes, kind = self.core, *_split(kind)
        origin, inner, limits = get_origin(kind), get_args(kind), _limits(notes)
        if known := _fields(kind):
            return self._record(kind, known)
        if names := [name for note in notes if isinstance(note, OneOf) for name in note.names]:
            return core.literal_schema(names)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return core.enum_schema(kind, list(kind))
        if origin is Literal:
            return core.literal_schema(list(inner))
        if origin in (Union, UnionType):
            others = [self.of(one) for one in inner if one is not NoneType]
            found = core.union_schema(others) if len(others) > 1 else others[0]
            return core.nullable_schema(found) if NoneType in inner else found
        if origin in (dict, Mapping):
            return core.dict_schema(self.of(inner[0]), self.of(inner[1]), **limits)
        if origin is list:
            return core.list_schema(self.of(inner[0]), fail_fast=self.one_each, **limits)
        if origin is tuple and inner[1:] == (Ellipsis,):
            return core.tuple_schema(
                [self.of(inner[0])], variadic_item_index=0, fail_fast=self.one_each, **limits
            )
        if origin is tuple:
            return core.tuple_schema([self.of(one) for one in inner])
        if kind is float:
            return core.float_schema(strict=True, allow_inf_nan=False, **limits)
        plain = {int: core.int_schema, str: core.str_schema, bool: core.bool_schema}
        return core.any_schema() if kind is Any else plain[kind](strict=True, **limits)

    def _record(self, kind: Any, known: Mapping[str, Any]) -> Any:
        core, extra = self.core, "allow" if kind in _OPEN_ENDED else "forbid"
        each = {name: self.of(one) for name, one in known.items()}
        if is_typeddict(kind):
            needed = {n for n, one in known.items() if get_origin(one) is not NotRequired}
            items = {
                name: core.typed_dict_field(one, required=kind.__total__ and name in needed)
                for name, one in each.items()
            }
            return core.typed_dict_schema(items, extra_behavior=extra)
        if not self.complete:
            for field in fields(kind):
                each[field.name] = self._with_default(each[field.name], field)
        parts = [core.dataclass_field(name, one) for name, one in each.items()]
        arguments = core.dataclass_args_schema(kind.__name__, parts, extra_behavior=extra)
        post_init = hasattr(kind, "__post_init__")
        return core.dataclass_schema(kind, arguments, list(each), post_init=post_init)

    def _with_default(self, schema: Any, field: Field[Any]) -> Any:
        if field.default is not MISSING:
            return self.core.with_default_schema(schema, default=field.default)
        if field.default_factory is not MISSING:
            return self.core.with_default_schema(schema, default_factory=field.default_factory)
        return schema


def _split(kind: Any) -> tuple[tuple[Any, ...], Any]:
    """Annotations of a type, and the type without them."""
    while get_origin(kind) is NotRequired:
        (kind,) = get_args(kind)
    notes = getattr(kind, "__metadata__", ())
    return notes, get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(notes: tuple[Any, ...]) -> dict[str, Any]:
    """Limits among the annotations, as arguments of pydantic's schemas."""
    names = ("ge", "gt", "le", "lt", "min_length", "pattern")
    return {name: getattr(note, name) for note in notes for name in names if hasattr(note, name)}


def _faults(kind: Any, given: Any, errors: list[Any]) -> Iterator[str]:
    """Faults of ``errors`` of pydantic, one for each place."""
    seen: set[str] = set()
    for error in errors:
        place: list[str] = []
        here, value = kind, given
        keys = list(error["loc"][1:])
        while keys and (inner := _part(here, keys[0])) is not None:
            parent, place, here = here, [*place, str(keys[0])], inner
            key = keys.pop(0)
            holds = key in value if isinstance(value, dict) else isinstance(value, list)
            value = value[key] if holds else None
        where = ".".join(place)
        match error["type"]:
            case "value_error":  # raised by the dataclass itself
                fault = f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
            case "missing" if not keys:
                fault = f"{where} is missing; allowed is {_allowed(here)}"
            case "unexpected_keyword_argument" | "extra_forbidden" if len(keys) == 1:
                where = ".".join([*place, str(keys[0])])
                known = _fields(_plain(here))
                like = did_you_mean(str(keys[0]), known)
                fault = f"{where} is unknown; {like}allowed are {', '.join(known)}"
            case _ if keys == ["[key]"]:
                fault = f"{where} is a key; allowed is {_allowed(get_args(_plain(parent))[0])}"
            case "too_short" if value:  # of faulty parts
                continue
            case _:
                shown = repr(value)
                shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
                fault = f"{where or 'the file'} is {shown}; allowed is {_allowed(here)}"
        if where not in seen or error["type"] == "value_error":
            seen.add(where)
            yield fault


def _part(kind: Any, key: str | int) -> Any:
    """Type of a value's part; None within a union or a tuple of unlike parts."""
    kind = _plain(kind)
    if known := _fields(kind):
        return known.get(str(key))
    inner = get_args(kind)
    if (
        get_origin(kind) in (tuple, list)
        and isinstance(key, int)
        and inner[1:] in ((), (Ellipsis,))
    ):
        return inner[0]
    if get_origin(kind) in (Mapping, dict) and key != "[key]":
        return inner[1]
    return None


def _plain(kind: Any) -> Any:
    """``kind`` without its annotations, and without None."""
    kind = _split(kind)[1]
    if get_origin(kind) in (Union, UnionType):
        others = [one for one in get_args(kind) if one is not NoneType]
        return _plain(others[0]) if len(others) == 1 else kind
    return kind


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass or typed dictionary; else empty."""
    if is_typeddict(kind):
        return get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {field.name: hints[field.name] for field in fields(kind)}
    return {}


def _allowed(kind: Any) -> str:
    """Description of the values of ``kind``."""
    notes, plain = _split(kind)
    text = next((note for note in notes if isinstance(note, str)), "")
    if plain in (int, float):
        number = ("a whole number" if plain is int else "a number") + _range(notes)
        return f"{number}: {text}" if text else number
    if text:
        return text
    for note in notes:
        if isinstance(note, OneOf):
            return f"one of {', '.join(note.names)}"
    origin, inner = get_origin(plain), get_args(plain)
    if origin in (Union, UnionType):
        each = [_allowed(one) for one in inner if one is not NoneType]
        return " or ".join(each) + (", or null" if NoneType in inner else "")
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return f"one of {', '.join(plain)}"
    if known := _fields(plain):
        return f"an object: {', '.join(known)}"
    some = ", not empty" * any(isinstance(note, MinLen) for note in notes)
    if origin in (tuple, list):
        return f"a list{some}, each {_allowed(inner[0])}"
    if inner and inner[1] is not Any:  # of a mapping
        return f"an object{some}, each value {_allowed(inner[1])}"
    return {str: "text", bool: "true or false"}.get(plain, "an object")


def _range(notes: tuple[Any, ...]) -> str:
    limits = {name: _number(limit) for name, limit in _limits(notes).items()}
    match limits:
        case {"ge": least, "le": most}:
            return f" from {least} to {most}"
        case {"ge": least, "lt": below}:
            return f" from {least}, below {below}"
        case {"gt": above, "le": most}:
            return f" above {above}, at most {most}"
        case {"ge": least}:
            return f", {least} or more"
        case {"gt": above}:
            return f" above {above}"
    return ""


def _number(limit: float) -> str:
    if isinstance(limit, int):
        return f"{limit:,}"
    return f"{limit:g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


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
