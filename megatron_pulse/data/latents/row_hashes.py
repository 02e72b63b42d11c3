"""Hash of every row of a shard, to detect damage when a row is read.

Whole files need not be read: a row's hash is compared at the row's first use. ``hashes-00000.bin``
holds little-endian 64-bit XXH3 hashes. For each file of the shard, in order of field names, the
header's hash comes first, then those of the rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

HASH_TYPE = np.dtype("<u8")
_HEADER_BYTES = 1 << 16
"""Upper bound of the header size of our ``.npy`` files."""


def row_hash(row: np.ndarray) -> int:
    """Hash of a row as stored on disk."""
    return int(xxhash.xxh3_64_intdigest(row.tobytes()))


def header_hash(path: Path) -> int:
    """Hash of the bytes before the rows of a ``.npy`` file."""
    with open(path, "rb") as file:
        content = file.read(_HEADER_BYTES)
    end = 10 + int.from_bytes(content[8:10], "little")
    return int(xxhash.xxh3_64_intdigest(content[:end]))


def hashes_of(path: Path, column: np.ndarray) -> np.ndarray:
    """Hashes of the file's header and of the rows of ``column``, the file's content."""
    found: np.ndarray = np.array([header_hash(path), *map(row_hash, column)], HASH_TYPE)
    return found
