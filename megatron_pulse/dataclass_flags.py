"""Command-line flags as dataclass fields: each field declares name, type and checks once.

    @dataclass(frozen=True)
    class Options:
        seconds: float = flag("longest search (default 10)", 10.0, metavar="S", within=ABOVE_ZERO)
        solver: Literal["highs", "none"] = flag("who searches", "highs")
        refresh: bool = flag("repeat the search")

    add_flags(Options, parser, "pulse-")      # --pulse-seconds S, --pulse-solver, --pulse-refresh
    options = read_flags(Options, parser.parse_args(), "pulse-")
    faults = flag_faults(options, "pulse-")   # "--pulse-seconds is -1; it must be ..."

The field's type determines the flag's form:

- a number, a text, or one of a ``Literal``;
- repeated KEY=VALUE (Mapping), or repeated text (tuple[str, ...]);
- no value (bool), or ``--x`` and ``--no-x`` (bool or None);
- the flags of another such dataclass.

Imports nothing slow, so that ``--help`` stays fast.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from megatron_pulse.errors import Faults, did_you_mean


@dataclass(frozen=True)
class Range:
    """Valid finite numbers of a flag; ``must`` describes them."""

    holds: Callable[[float], bool]
    must: str

    def faults(self, flag: str, value: float | None) -> list[str]:
        """Fault if the value of ``flag`` is outside the range."""
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
                f"{text!r} is not a number; it must be {self.must}"
            ) from None
        if faults := self.faults("", value):
            raise argparse.ArgumentTypeError(faults[0].strip())
        return value


ABOVE_ZERO = Range(lambda value: value > 0, "above 0")
FROM_ZERO = Range(lambda value: value >= 0, "0 or more")
FROM_ONE = Range(lambda value: value >= 1, "1 or more")
NONE_OR_FROM_ONE = Range(lambda value: value == 0 or value >= 1, "0, or 1 or more")
PIXELS = Range(lambda value: 1 <= value <= 8192, "from 1 to 8,192 pixels per side")
TO_4096 = Range(lambda value: 1 <= value <= 4096, "from 1 to 4,096")
TO_MILLION = Range(lambda value: 1 <= value <= 1_000_000, "from 1 to 1,000,000")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
FROM_ZERO_TO_ONE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""dtype names of flags, with those of torch and NumPy."""


@dataclass(frozen=True)
class _Flag:
    """Properties of a flag besides type and default (see ``flag``)."""

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
    """Dataclass field that is a flag.

    - ``name``: name of the flag, if not the field's.
    - ``read``: parser for types unknown to argparse; raises argparse.ArgumentTypeError.
    - ``check``: takes the whole dataclass and returns a fault of this flag among the others, to
      follow the flag's name.
    - ``marks``: labels for ``marked``.

    ``help`` may contain "{word}", replaced by the argument ``word`` of ``add_flags``.
    """
    what = _Flag(help, name, metavar, choices, read, within, check, frozenset(marks))
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"flag": what})
    return field(default=default, metadata={"flag": what})


RECIPE, STARTING_RECIPE = "recipe.toml", "recipe.starting.toml"
"""File of the recipe in the folder of a run, and of a start's until its ranks have accepted it."""

RECIPE_KEYS = "PULSE_RECIPE_KEYS"
"""Environment variable of a run by a recipe: JSON object with the recipe's key of each flag."""

RENAMED = {
    "--pulse-slow-ratio": "--pulse-straggler-threshold",
    "--pulse-verify-every": "--pulse-sdc-check-interval",
    "--pulse-encode": "--pulse-encoder-schedule",
    "--worlds": "--world-sizes",
    "--no-averages": "--no-ema",
    "--no-split": "--no-split-backward",
}
"""Flags under their former names, which are accepted for one version."""
RENAMED_VALUES = {"--pulse-encoder-schedule": {"front": "before-step"}}


def with_new_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of a command line with renamed flags replaced, and a sentence for each of those."""
    found: list[str] = []
    told: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name in RENAMED:
            told[name] = f"{name} is now called {RENAMED[name]}"
            name = RENAMED[name]
            word = name + equals + value
        flag = name if equals and name in RENAMED_VALUES else (found[-1] if found else "")
        for old, new in RENAMED_VALUES.get(flag, {}).items():
            given = value if flag == name else word
            if given.rpartition("=")[2] == old:
                word = word.removesuffix(old) + new
                told[old] = f"{flag} {old} is now called {new}"
        found.append(word)
    return found, list(told.values())


class NearestChoiceParser(argparse.ArgumentParser):
    """Parser that names the choices most like a wrong one, of flags and of commands."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ())).strip()
            error.message += f"; {near}" if near else ""
            raise


def flags_of(kind: type, **words: str) -> Any:
    """Field that holds another dataclass of flags; ``words`` are for its help texts."""
    return field(default_factory=kind, metadata={"words": words})


def add_flags(
    cls: type, parser: Any, prefix: str = "", *, without: Collection[str] = (), **words: str
) -> None:
    """Add the flags of ``cls`` in the order of its fields, except the fields in ``without``."""
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
    """Values of the flags; flags absent from ``args`` have their defaults.

    Raises Faults for values not of the form KEY=VALUE.
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
    """Yield faults of flags' values, alone or in combination."""
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
    """Names of the fields of ``cls`` whose flags have this mark."""
    return [
        f.name for f in fields(cls) if "flag" in f.metadata and mark in f.metadata["flag"].marks
    ]


def key_values(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Mapping from repeated KEY=VALUE; raises Faults with every text of another form."""
    if faults := [f"{flag} {text}: write it as KEY=VALUE" for text in texts if "=" not in text]:
        raise Faults(faults)
    return dict(text.split("=", 1) for text in texts)


def flag_name(name: str) -> str:
    """Flag of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def flag_value(value: object) -> str:
    """Value in the syntax of flags: ``320,640``, ``true``, ``none``."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _argparse(what: _Flag, kind: Any, default: Any) -> dict[str, Any]:
    """Arguments of argparse's ``add_argument`` for a flag of this type."""
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
    """Fields of a dataclass with their types, cached because type resolution is slow."""
    if cls not in _KNOWN:
        types = get_type_hints(cls)
        _KNOWN[cls] = tuple((each, types[each.name]) for each in fields(cls))
    return _KNOWN[cls]


def _written(each: Field[Any], prefix: str) -> str:
    """Flag with prefix and dashes."""
    what: _Flag | None = each.metadata.get("flag")
    name = each.name if what is None or what.name is None else what.name
    return flag_name(prefix + name)


def _dest(each: Field[Any], prefix: str) -> str:
    return _written(each, prefix)[2:].replace("-", "_")
