"""A hash of every row of a shard, so that damage is seen in what is read, when it is read.

Whole files are not read for it: a row's hash is compared where the row is. ``hashes-00000.bin`` has
XXH3 of 64 bits, little-endian: for each file of the shard, by the names of the fields, that of its
header and those of its rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

HASH_TYPE = np.dtype("<u8")
_HEADER_BYTES = 1 << 16
"""At least as long as the header of a ``.npy`` file of ours."""


def row_hash(row: np.ndarray) -> int:
    """Of a row as it is on disk."""
    return int(xxhash.xxh3_64_intdigest(row.tobytes()))


def header_hash(path: Path) -> int:
    """Of what is before the rows of a ``.npy`` file."""
    with open(path, "rb") as file:
        content = file.read(_HEADER_BYTES)
    end = 10 + int.from_bytes(content[8:10], "little")
    return int(xxhash.xxh3_64_intdigest(content[:end]))


def hashes_of(path: Path, column: np.ndarray) -> np.ndarray:
    """Of the file's header, and of the rows of ``column``, which it holds."""
    found: np.ndarray = np.array([header_hash(path), *map(row_hash, column)], HASH_TYPE)
    return found
