"""Faults of an input: all of them at once, as a list that can be read, however many there are.

A fault is a sentence, or what ``told`` made of several: a heading with its own list, which stands
indented in a list around it and counts there as that many.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

LOOKED_FOR = 1000
"""Faults of one file, which may have millions."""
_SHOWN = 40
_OF_A_KIND = 3
_LONGEST = 4000  # characters: what is longer quotes a damaged file
_COUNT = re.compile(r" \((\d+) faults\):$", re.MULTILINE)
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class UserError(ValueError):
    """What a user can mend; the message says what is wrong and what to do."""


class Carried(Exception):
    """An error that other processes get as it is, though it is made of more than its message."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[Carried], args: tuple[Any, ...]) -> Carried:
    return kind.__new__(kind, *args)


class Faults(Carried, ValueError):
    """Several faults that have no more in common than that they were found together."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__(all_of(self.faults))


def all_of(faults: Sequence[str]) -> str:
    """The fault, or a counted list of several."""
    if len(faults) == 1:
        return faults[0]
    return f"{counted(faults)} faults:{listed(faults)}"


def faults_in(error: Exception) -> list[str]:
    """Each of what was found together, or the one thing that ``error`` says."""
    return error.faults if isinstance(error, Faults) else [str(error)]


def first_of(faults: Iterable[str]) -> list[str]:
    """The first ``LOOKED_FOR``, and where there are more, that they were not looked for."""
    found = list(islice(faults, LOOKED_FOR + 1))
    if len(found) > LOOKED_FOR:
        found[LOOKED_FOR] = f"and more: no more than {LOOKED_FOR:,} are looked for at once"
    return found


@contextmanager
def collecting(
    faults: list[str], kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Within, an error of these ``kinds`` adds to ``faults`` what it says."""
    try:
        yield
    except kinds as error:
        faults += faults_in(error)


def told(what: str, faults: Sequence[str], remedy: str = "") -> str:
    """What is wrong with ``what``: ``what: fault``, or a counted list; ``remedy`` is a line below.

    >>> print(told("plan.json", ["pipeline is 0", "data is missing"]))
    plan.json (2 faults):
      - pipeline is 0
      - data is missing
    """
    text = f"{what} ({counted(faults)} faults):{listed(faults)}"
    if len(faults) == 1:
        text = f"{what}: {faults[0]}"
    return f"{text}\n{remedy}" if remedy else text


def counted(faults: Sequence[str]) -> int:
    """How many faults these are, those of nested lists one by one."""
    return sum(sum(map(int, _COUNT.findall(fault)[:1])) or 1 for fault in faults)


def listed(faults: Sequence[str], shown: int = _SHOWN) -> str:
    """A line ``  - fault`` for each, every line after a line break.

    What is there several times is said once and counted. Of more than ``shown``, those that differ
    only in numbers and quoted names are told by the first three, with the number of the others.
    Lines of a fault after its first are indented, and the lists that it has are not counted again.
    """
    faults = [_within(fault) for fault in faults]
    times = Counter(faults)
    lines = [f"{fault} ({n} times)" if n > 1 else fault for fault, n in times.items()]
    if len(lines) > shown:
        kinds: dict[str, list[str]] = {}
        for fault, line in zip(times, lines, strict=True):
            kinds.setdefault(_PARTICULAR.sub("#", fault), []).append(line)
        grouped = []
        for alike in kinds.values():
            grouped += alike[:_OF_A_KIND]
            if len(alike) > _OF_A_KIND:
                grouped.append(f"and {len(alike) - _OF_A_KIND} more like it")
        lines = grouped
    if len(lines) > shown:
        lines = [*lines[:shown], f"and {len(lines) - shown} more"]
    return "".join(f"\n  - {line}" for line in lines)


def _within(fault: str) -> str:
    """A fault of one line or more as it stands in a list."""
    lines = _COUNT.sub(":", fault).splitlines() or [""]
    return "\n    ".join(f if len(f) <= _LONGEST else f"{f[:_LONGEST]} ..." for f in lines)


def raised(error: BaseException) -> str:
    """An exception of someone's own code in one line: kind, message, file and line."""
    ours = Path(__file__).parent
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith("<")
        and ours not in Path(frame.filename).parents
        and Path(frame.filename).name != "__init__.py"
    ]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    goes_on = bool(lines) and lines[0].endswith((":", ","))
    said = " ".join(lines[: 1 + goes_on])
    return f"{type(error).__name__}: {said}".rstrip(": ") + where


def wrong_kinds(given: Iterable[tuple[str, object, type, str]]) -> list[str]:
    """A fault for each (name of an argument, value, type, remark) of another type."""
    return [
        f"{name} must be of type {kind.__name__}{remark}, is {value!r:.60}"
        for name, value, kind, remark in given
        if not isinstance(value, kind)
    ]


def wrong_count(name: str, value: object) -> list[str]:
    """A fault where the argument of that name is no whole number from 1 on."""
    fits = type(value) is int and value >= 1
    return [] if fits else [f"{name} must be a whole number from 1 on, is {value!r}"]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """That no ``what`` has this name, which names are like it, and which there are."""
    names = list(known)
    return f"no {what} is called {name[:60]!r}; {meant(name, names)}there are: {', '.join(names)}"


def unmatched(patterns: Iterable[str], names: Sequence[str], what: str) -> list[str]:
    """That no ``what`` matches a pattern (fnmatch's), for each that none of ``names`` does, with
    close ones or the first."""
    return [
        f"no {what} matches {pattern!r}; "
        + (meant(pattern, names) or f"the first is called {names[0]!r}").rstrip()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def meant(name: str, known: Iterable[str]) -> str:
    """``did you mean X or Y? `` for the names most like ``name``; empty where none is."""
    lower = {known_name.lower(): known_name for known_name in known}
    word = name[:60].lower()
    close = difflib.get_close_matches(word, lower, n=3, cutoff=0.5)
    like = [difflib.SequenceMatcher(None, match, word).ratio() for match in close]
    close = [match for match, ratio in zip(close, like, strict=True) if ratio > like[0] - 0.3]
    return f"did you mean {' or '.join(lower[match] for match in close)}? " if close else ""
