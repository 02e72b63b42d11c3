"""Checksum at the beginning of a text file, to detect damage.

The checksum is the first entry of the file's object, on its own line, and covers everything after::

    {                                                      xxh3_128: "93f4..."
     "xxh3_128": "93f4...",                                # A cluster
     "format": "megatron_pulse plan 3",                    name: ours

A file without this line is accepted unchecked: written by hand, or by an earlier version. XXH3 of
128 bits detects damage; it does not authenticate the author.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import xxhash

HASH = "xxh3_128"
_DIGEST = re.compile("[0-9a-f]{32}")


def add_checksum(text: str) -> str:
    """Prepend the checksum to ``text``, an object in JSON or YAML."""
    if text.startswith("{"):
        rest = text[1:].removeprefix("\n")
        return f'{{\n "{HASH}": "{_digest(rest)}",\n{rest}'
    return f'{HASH}: "{_digest(text)}"\n{text}'


def remove_checksum(text: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """``record``, read from ``text``, without its checksum.

    Raises ValueError if contents and checksum differ. A damaged name of the checksum's entry is
    recognised by its length and value.
    """
    first, value = next(iter(record.items()), ("", None))
    was_hash = len(str(first)) == len(HASH) and _DIGEST.fullmatch(str(value))
    if HASH not in record and not was_hash:
        return dict(record)
    rest = text.split("\n", 2 if text.startswith("{") else 1)[-1]
    if first != HASH or text != add_checksum("{" + rest if text.startswith("{") else rest):
        raise ValueError(
            f"it is damaged, or was edited: its contents do not match its hash; restore it, or "
            f"remove its line {HASH!r} to have it read as it is"
        )
    return {name: said for name, said in record.items() if name != HASH}


def _digest(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
