"""Units of samples that stay together in the split into training and validation."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress

import xxhash

from megatron_pulse.data.stored_file import ArchivedFile, StoredFile, open_stored, stored_size

MOST_COMPARED = 100_000
"""Files; of more, only names are compared: every rank looks at each when a run starts."""
_END_BYTES = 4096


def units_of(ties: Sequence[Sequence[Hashable]]) -> list[int]:
    """Unit number of each sample, from 0.

    Samples with a common tie are in one unit, also if connected through other samples.
    """
    parent = list(range(len(ties)))

    def root(sample: int) -> int:
        while parent[sample] != sample:
            parent[sample] = parent[parent[sample]]
            sample = parent[sample]
        return sample

    first: dict[Hashable, int] = {}
    for sample, own in enumerate(ties):
        for tie in own:
            parent[root(sample)] = root(first.setdefault(tie, sample))
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(sample), len(numbers)) for sample in range(len(ties))]


def content_hash(*paths: StoredFile) -> int:
    """Hash of the bytes of files (XXH3, 63 bits); raises OSError."""
    whole = xxhash.xxh3_64()
    for path in paths:
        with open_stored(path) as file:
            while piece := file.read(1 << 20):
                whole.update(piece)
    return int(whole.intdigest()) >> 1


def ends_hash(path: StoredFile) -> int:
    """Hash of a file's size, beginning and end (XXH3, 63 bits); 0 if unreadable."""
    if isinstance(path, ArchivedFile) and (known := path.ends()):
        return known
    try:
        size, ends = stored_size(path), _ends(path)
    except OSError:  # told where it is read
        return 0
    return int(xxhash.xxh3_64_intdigest(size.to_bytes(8, "little") + ends)) >> 1


def name_hash(name: str) -> int:
    """Hash of a text (XXH3, 63 bits)."""
    return int(xxhash.xxh3_64_intdigest(name.encode())) >> 1


def same_files(files: Sequence[StoredFile]) -> list[Hashable]:
    """Key of each file, equal for files with equal bytes.

    Whole files are read only if size, beginning and end are equal. The key is the path for more
    than 100,000 files, and for unreadable ones.
    """
    unique = list(dict.fromkeys(files))
    keys: dict[StoredFile, Hashable] = {path: path for path in unique}
    if len(unique) <= MOST_COMPARED:
        for sized in _alike(unique, stored_size):
            for ended in _alike(sized, ends_hash):
                for same in _alike(ended, content_hash):
                    keys |= dict.fromkeys(same, same[0])
    return [keys[path] for path in files]


def uncompared(files: Sequence[StoredFile]) -> str:
    """Caution that these files are too many for ``same_files`` to compare; else empty."""
    if (count := len(set(files))) <= MOST_COMPARED:
        return ""
    return (
        f"{count:,} pictures are too many to compare contents (at most {MOST_COMPARED:,}): "
        "validation pictures may have copies under other names in the training data. Remove "
        "copies, or write latents ('pulse data write-latents'), which store a hash of each picture"
    )


def _alike(
    paths: Sequence[StoredFile], key: Callable[[StoredFile], Hashable]
) -> Iterator[list[StoredFile]]:
    """Groups of at least two paths with equal keys."""
    found = defaultdict[Hashable, list[StoredFile]](list)
    for path in paths:
        with suppress(OSError):  # told where it is read
            found[key(path)].append(path)
    yield from (same for same in found.values() if len(same) > 1)


def _ends(path: StoredFile) -> bytes:
    with open_stored(path) as file:
        head = file.read(_END_BYTES)
        file.seek(max(file.seek(0, io.SEEK_END) - _END_BYTES, 0))
        return head + file.read(_END_BYTES)
