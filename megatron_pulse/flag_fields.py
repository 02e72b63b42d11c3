"""Flags as the fields of a dataclass: each says once how it is written, read and checked.

    @dataclass(frozen=True)
    class Options:
        seconds: float = flag("longest search (default 10)", 10.0, metavar="S", within=ABOVE_ZERO)
        solver: Literal["highs", "none"] = flag("who searches", "highs")
        again: bool = flag("search anew")

    add_flags(Options, parser, "pulse-")      # --pulse-seconds S, --pulse-solver, --pulse-again
    options = read_flags(Options, parser.parse_args(), "pulse-")
    faults = flag_faults(options, "pulse-")   # "--pulse-seconds is -1; it must be ..."

A flag takes what its field's type says: a number, a text, one of a ``Literal``, KEY=VALUE any
number of times (a Mapping), a text any number of times (tuple[str, ...]), nothing (bool), ``--x``
or ``--no-x`` (bool or None), or the flags of another such dataclass. Imports nothing slow, so that
``--help`` stays fast.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from megatron_pulse.faults import Faults


@dataclass(frozen=True)
class Range:
    """Finite numbers that a flag takes; ``must`` says which."""

    holds: Callable[[float], bool]
    must: str

    def faults(self, flag: str, value: float | None) -> list[str]:
        """That ``flag`` is given a number outside, if it is."""
        if value is None or (value != math.inf and self.holds(value)):
            return []
        shown = f"{value:g}" if isinstance(value, float) else f"{value:,}"
        shown = shown if len(shown) <= 40 else f"{shown[:20]}..."
        finite = isinstance(value, int) or math.isfinite(value)
        must = self.must if finite else f"finite, {self.must}"
        return [f"{flag} is {shown}; it must be {must}"]

    def read(self, text: str) -> float:
        """The number of a flag, as its type for argparse."""
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number; it must be {self.must}"
            ) from None
        if faults := self.faults("", value):
            raise argparse.ArgumentTypeError(faults[0].strip())
        return value


ABOVE_ZERO = Range(lambda value: value > 0, "above 0")
FROM_ZERO = Range(lambda value: value >= 0, "0 or more")
FROM_ONE = Range(lambda value: value >= 1, "1 or more")
NONE_OR_FROM_ONE = Range(lambda value: value == 0 or value >= 1, "0, or 1 or more")
PIXELS = Range(lambda value: 1 <= value <= 8192, "from 1 to 8,192 pixels of a side")
TO_4096 = Range(lambda value: 1 <= value <= 4096, "from 1 to 4,096")
TO_MILLION = Range(lambda value: 1 <= value <= 1_000_000, "from 1 to 1,000,000")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
FROM_ZERO_TO_ONE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Types of numbers as flags call them, and as torch and NumPy do."""


@dataclass(frozen=True)
class _Flag:
    """What a field says of its flag, apart from type and default (see ``flag``)."""

    help: str
    name: str | None
    metavar: str | None
    choices: Sequence[str] | None
    read: Callable[[str], Any] | None
    within: Range | None
    check: Callable[[Any], str | None] | None
    marks: frozenset[Any]


def flag(
    help: str,
    default: Any = None,
    *,
    name: str | None = None,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    read: Callable[[str], Any] | None = None,
    within: Range | None = None,
    check: Callable[[Any], str | None] | None = None,
    marks: Collection[Any] = (),
) -> Any:
    """A field that is a flag.

    ``name`` is for a flag that is not called as its field, ``read`` for a type that argparse does
    not know (it raises argparse.ArgumentTypeError). ``check`` takes the whole dataclass and says
    what is wrong with this flag beside the others, to be read after its name. ``marks`` are for
    ``marked``. In ``help`` "{word}" stands for what ``add_flags`` is given as ``word``.
    """
    what = _Flag(help, name, metavar, choices, read, within, check, frozenset(marks))
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"flag": what})
    return field(default=default, metadata={"flag": what})


def flags_of(kind: type, **words: str) -> Any:
    """A field that holds another dataclass of flags; ``words`` are for its help texts."""
    return field(default_factory=kind, metadata={"words": words})


def add_flags(
    cls: type, parser: Any, prefix: str = "", *, without: Collection[str] = (), **words: str
) -> None:
    """Add the flags of ``cls``, but for the fields ``without``, in the order of its fields."""
    for each, kind in _typed(cls):
        if each.name in without:
            continue
        what: _Flag | None = each.metadata.get("flag")
        if what is None:
            if is_dataclass(kind):
                add_flags(cast(type, kind), parser, prefix, **each.metadata.get("words", {}))
            continue
        text = what.help
        for word, meaning in words.items():
            text = text.replace(f"{{{word}}}", meaning)
        takes = {**_argparse(what, kind, each.default), "help": text}
        parser.add_argument(_written(each, prefix), **takes)


def read_flags[Options](cls: type[Options], args: argparse.Namespace, prefix: str = "") -> Options:
    """What was given; a flag that ``args`` do not have is at its default.

    Raises Faults for what is not KEY=VALUE.
    """
    values: dict[str, Any] = {}
    for each, kind in _typed(cls):
        name = _dest(each, prefix)
        if "flag" not in each.metadata:
            if is_dataclass(kind):
                values[each.name] = read_flags(cast(type[Any], kind), args, prefix)
        elif hasattr(args, name):
            given = getattr(args, name)
            if get_origin(kind) is Mapping:
                given = key_values(given, _written(each, prefix))
            values[each.name] = tuple(given) if kind == tuple[str, ...] else given
    return cls(**values)


def flag_faults(options: Any, prefix: str = "") -> Iterator[str]:
    """What is wrong with the values of flags, in themselves or beside each other."""
    for each, kind in _typed(type(options)):
        value, what = getattr(options, each.name), each.metadata.get("flag")
        if what is None:
            if is_dataclass(kind):
                yield from flag_faults(value, prefix)
            continue
        if what.within is not None:
            yield from what.within.faults(_written(each, prefix), value)
        if what.check is not None and (fault := what.check(options)):
            yield f"{_written(each, prefix)} {fault}"


def marked(cls: type, mark: Any) -> list[str]:
    """The fields of ``cls`` whose flags have this mark."""
    return [
        f.name for f in fields(cls) if "flag" in f.metadata and mark in f.metadata["flag"].marks
    ]


def key_values(texts: Sequence[str], flag: str) -> dict[str, str]:
    """What repeated KEY=VALUE say; raises Faults with every text that is not of that form."""
    if faults := [f"{flag} {text}: write it as KEY=VALUE" for text in texts if "=" not in text]:
        raise Faults(faults)
    return dict(text.split("=", 1) for text in texts)


def flag_name(name: str) -> str:
    """How the flag of an attribute of the parsed arguments is written."""
    return f"--{name.replace('_', '-')}"


def flag_value(value: object) -> str:
    """A value as flags take it: ``320,640``, ``true``, ``none``."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _argparse(what: _Flag, kind: Any, default: Any) -> dict[str, Any]:
    """What argparse takes for a flag of that type."""
    if get_origin(kind) is Mapping:
        return {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    if kind == tuple[str, ...]:
        return {"action": "append", "default": [], "metavar": what.metavar}
    optional = type(None) in get_args(kind)
    plain = get_args(kind)[0] if optional else kind
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction if optional else "store_true"}
    takes = {
        "default": default,
        "metavar": what.metavar,
        "type": what.read or (plain if plain in (int, float) else None),
        "choices": what.choices or (get_args(plain) if get_origin(plain) is Literal else None),
    }
    return {name: value for name, value in takes.items() if value is not None}


_KNOWN: dict[Any, tuple[tuple[Field[Any], Any], ...]] = {}


def _typed(cls: type) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a dataclass and their types, which take long to find: once for each."""
    if cls not in _KNOWN:
        types = get_type_hints(cls)
        _KNOWN[cls] = tuple((each, types[each.name]) for each in fields(cls))
    return _KNOWN[cls]


def _written(each: Field[Any], prefix: str) -> str:
    """The flag as it is written."""
    what: _Flag | None = each.metadata.get("flag")
    name = each.name if what is None or what.name is None else what.name
    return flag_name(prefix + name)


def _dest(each: Field[Any], prefix: str) -> str:
    return _written(each, prefix)[2:].replace("-", "_")
