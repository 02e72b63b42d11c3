"""The hash that a text file of ours begins with: a flipped bit anywhere in it is seen.

It is the first entry of the file's object, on a line of its own, and is that of all that follows::

    {                                                      xxh3_128: "93f4..."
     "xxh3_128": "93f4...",                                # A cluster
     "format": "megatron_pulse plan 3",                    name: ours

Without that line the file is as sound, and taken as it is: written by hand, or by an earlier
version. XXH3 of 128 bits tells damage; it proves nothing of who wrote the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import xxhash

HASH = "xxh3_128"
_DIGEST = re.compile("[0-9a-f]{32}")


def sealed(text: str) -> str:
    """``text``, an object in JSON or YAML, with its hash in front."""
    if text.startswith("{"):
        rest = text[1:].removeprefix("\n")
        return f'{{\n "{HASH}": "{_digest(rest)}",\n{rest}'
    return f'{HASH}: "{_digest(text)}"\n{text}'


def unsealed(text: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What ``record``, read from ``text``, says beside its hash.

    Raises ValueError if it is not what was written. Where a bit of the hash's own name is another,
    its length and its value still show what it is.
    """
    first, value = next(iter(record.items()), ("", None))
    was_hash = len(str(first)) == len(HASH) and _DIGEST.fullmatch(str(value))
    if HASH not in record and not was_hash:
        return dict(record)
    rest = text.split("\n", 2 if text.startswith("{") else 1)[-1]
    if first != HASH or text != sealed("{" + rest if text.startswith("{") else rest):
        raise ValueError(
            f"it is damaged, or was edited: its contents do not match its hash; restore it, or "
            f"remove its line {HASH!r} to have it read as it is"
        )
    return {name: said for name, said in record.items() if name != HASH}


def _digest(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
