"""Table of Megatron's flags, read from ``megatron.txt``. Imports neither torch nor Megatron."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FILE = Path(__file__).with_name("megatron.txt")
_REASONS = "reasons"


class Support(StrEnum):
    """Support of a flag.

    A given flag that is refused or meaningless ends the run before it starts. A refused one may be
    given with the value that the run has anyway.
    """

    WORKS = "works"
    REFUSED = "refused"
    MEANINGLESS = "meaningless"


@dataclass(frozen=True)
class Flag:
    """Flag of Megatron's, by its first name.

    ``note`` tells what the flag does, why it cannot be used and what to use instead, or why it is
    meaningless. ``values`` are the supported ones; empty: all.
    """

    name: str
    group: str
    standing: Support
    note: str
    values: tuple[str, ...] = ()


@functools.cache
def load_table() -> Mapping[str, Flag]:
    """Flags by name, in the order of Megatron's parser."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {flag.name: flag for flag in _read(lines)}


def _read(lines: list[str]) -> Iterator[Flag]:
    reasons: dict[str, str] = {}
    group = ""
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            group = line.strip("[]")
            continue
        word, rest = line.split(maxsplit=1)
        if group == _REASONS:
            reasons[word] = rest
            continue
        name, note = rest.split(maxsplit=1)
        name, _, values = name.partition("=")
        if note.startswith("@"):
            note = reasons[note[1:]]
        yield Flag(name, group, Support(word), note, tuple(values.split("|")) if values else ())
