"""Lists of input faults: all at once, and readable however many.

A fault is a sentence, or a result of ``format_faults``: a heading with its own list. Such a list is
indented in an enclosing list and counts as its number of faults.
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
"""Maximum number of faults reported for one file, which may have millions."""
_SHOWN = 40
_OF_A_KIND = 3
_LONGEST = 4000  # characters; longer texts quote a damaged file
_COUNT = re.compile(r" \((\d+) faults\):$", re.MULTILINE)
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class UserError(ValueError):
    """Error that a user can correct; the message gives the fault and the fix."""


class PicklableError(Exception):
    """Error that can be pickled although its constructor takes more than the message."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[PicklableError], args: tuple[Any, ...]) -> PicklableError:
    return kind.__new__(kind, *args)


class Faults(PicklableError, ValueError):
    """Several unrelated faults found together."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__(summarize(self.faults))


def summarize(faults: Sequence[str]) -> str:
    """The single fault, or a counted list of several."""
    if len(faults) == 1:
        return faults[0]
    return f"{counted(faults)} faults:{format_list(faults)}"


def faults_in(error: Exception) -> list[str]:
    """Faults collected in ``error``, or its single text."""
    return error.faults if isinstance(error, Faults) else [str(error)]


def first_of(faults: Iterable[str]) -> list[str]:
    """First ``LOOKED_FOR`` faults, with a note if there are more."""
    found = list(islice(faults, LOOKED_FOR + 1))
    if len(found) > LOOKED_FOR:
        found[LOOKED_FOR] = f"and more: the search stops after {LOOKED_FOR:,}"
    return found


@contextmanager
def collecting(
    faults: list[str], kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Append errors of the given ``kinds`` to ``faults`` within the context."""
    try:
        yield
    except kinds as error:
        faults += faults_in(error)


@contextmanager
def naming(*flags: str, kinds: type[ValueError] = ValueError) -> Iterator[None]:
    """Begin the text of an error raised within by the ``flags`` that it is about, if any.

    A text that begins with a flag stays.
    """

    def named(text: str) -> str:
        return text if not flags or text.startswith("--") else f"{', '.join(flags)}: {text}"

    try:
        yield
    except kinds as error:
        if isinstance(error, Faults):
            error.faults = [named(fault) for fault in error.faults]
            error.args = (summarize(error.faults),)
        else:
            error.args = (named(str(error)),)
        raise


def format_faults(what: str, faults: Sequence[str], remedy: str = "") -> str:
    """Text of faults of ``what``: ``what: fault``, or a counted list; ``remedy`` is a further line.

    >>> print(format_faults("plan.json", ["pipeline is 0", "data is missing"]))
    plan.json (2 faults):
      - pipeline is 0
      - data is missing
    """
    text = f"{what} ({counted(faults)} faults):{format_list(faults)}"
    if len(faults) == 1:
        text = f"{what}: {faults[0]}"
    return f"{text}\n{remedy}" if remedy else text


def counted(faults: Sequence[str]) -> int:
    """Number of faults, including those of nested lists."""
    return sum(sum(map(int, _COUNT.findall(fault)[:1])) or 1 for fault in faults)


def format_list(faults: Sequence[str], shown: int = _SHOWN) -> str:
    """Lines ``  - fault``, each after a line break.

    Repeated faults appear once with their count. Beyond ``shown`` lines, faults that differ only in
    numbers and quoted names are grouped: the first three, and the number of others. Further lines
    of a fault are indented; the counts of nested lists are dropped.
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
    """Format a fault for use within a list."""
    lines = _COUNT.sub(":", fault).splitlines() or [""]
    return "\n    ".join(f if len(f) <= _LONGEST else f"{f[:_LONGEST]} ..." for f in lines)


def describe_exception(error: BaseException) -> str:
    """One-line text of an exception from user code: type, message, file and line."""
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


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Fault for an unknown name of a ``what``, with similar and known names."""
    names = list(known)
    near = did_you_mean(name, names)
    return f"no {what} is called {name[:60]!r}; {near}there are: {', '.join(names)}"


def unmatched_patterns(patterns: Iterable[str], names: Sequence[str], what: str) -> list[str]:
    """Faults for fnmatch patterns that match none of ``names``, with similar names or the first."""
    return [
        f"no {what} matches {pattern!r}; "
        + (did_you_mean(pattern, names) or f"the first is called {names[0]!r}").rstrip()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Text ``did you mean X or Y? `` for names similar to ``name``; empty without any."""
    lower = {known_name.lower(): known_name for known_name in known}
    word = name[:60].lower()
    close = difflib.get_close_matches(word, lower, n=3, cutoff=0.5)
    like = [difflib.SequenceMatcher(None, match, word).ratio() for match in close]
    close = [match for match, ratio in zip(close, like, strict=True) if ratio > like[0] - 0.3]
    return f"did you mean {' or '.join(lower[match] for match in close)}? " if close else ""
