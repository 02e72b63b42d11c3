"""Sizes and hashes of a checkpoint's files, kept in its ``metadata.json``, and their comparison.

Megatron writes ``metadata.json`` last. A checkpoint cannot lose its hashes and still look complete.
Files are hashed in chunks while they are written. Many ranks therefore share the reading evenly,
whatever the number of files. The parts that are read first can be verified alone.

The hash is 128-bit XXH3. It detects damage as reliably as SHA-256 and takes little of the time of a
save. Earlier checkpoints have SHA-256 hashes, which are still verified.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Buffer, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from megatron_pulse.errors import Faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, read_text
from megatron_pulse.paths import is_file_name
from megatron_pulse.runtime.collectives import gather_objects

METADATA = "metadata.json"
"""File that is written last into a checkpoint's folder."""
INDEX = ".metadata"
"""Torch's index: the file and the offset of each tensor."""
CHUNK_BYTES = 64 << 20
"""Number of bytes that one hash covers."""

_HASHES, _DIGEST = "pulse_files", "pulse_sha256"
_LEGACY = "common.pt"
_BACKEND = "sharded_backend"
"""Key without which Megatron cannot read a checkpoint."""
_MEGATRONS = {
    _BACKEND,
    "sharded_backend_version",
    "common_backend",
    "common_backend_version",
}
_READ_BYTES = 1 << 20


class HashKind(StrEnum):
    """Hash function of the chunks, by its name in ``metadata.json``."""

    XXH3 = "xxh3_128"
    SHA256 = "sha256"

    def begin(self) -> Any:
        """Return the hash object of an empty input."""
        return xxhash.xxh3_128() if self is HashKind.XXH3 else hashlib.sha256()


@dataclass(frozen=True)
class FileHash:
    """Size of a file in bytes, and the hash of each of its chunks of ``CHUNK_BYTES``."""

    num_bytes: int
    chunks: tuple[str, ...]
    kind: HashKind = HashKind.XXH3


class HashedFile(io.FileIO):
    """New file that is hashed while it is written from its beginning.

    ``refused`` is the system's error if a write failed: torch and Megatron drop it.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "wb")
        self.refused: OSError | None = None
        self._num_bytes = 0
        self._chunks: list[str] = []
        self._digest = HashKind.XXH3.begin()

    def write(self, content: Buffer, /) -> int:
        """Write as a raw file does, perhaps fewer bytes than given, and return their number."""
        try:
            written = super().write(content)
        except OSError as error:
            self.refused = OSError(error.errno, error.strerror, str(self.name))
            raise
        rest = memoryview(content)[:written]
        while rest:
            part = rest[: CHUNK_BYTES - self._num_bytes % CHUNK_BYTES]
            self._digest.update(part)
            self._num_bytes += len(part)
            rest = rest[len(part) :]
            if self._num_bytes % CHUNK_BYTES == 0:
                self._chunks.append(self._digest.hexdigest())
                self._digest = HashKind.XXH3.begin()
        return written

    @property
    def hashed(self) -> FileHash:
        """Size and hashes of the bytes written so far."""
        chunks = list(self._chunks)
        if self._num_bytes % CHUNK_BYTES or not chunks:
            chunks.append(self._digest.hexdigest())
        return FileHash(self._num_bytes, tuple(chunks))


class BufferedFile(io.BufferedWriter):
    """Buffered file for Megatron's writers, flushed whenever its descriptor is asked for.

    The writers sync a file by its descriptor, so all bytes must be in the file before.
    """

    def fileno(self) -> int:
        """Flush the buffer and return the file descriptor."""
        if not self.closed:
            self.flush()
        return super().fileno()


@dataclass(frozen=True)
class Chunk:
    """The ``index``-th ``CHUNK_BYTES`` of the file ``name``."""

    name: str
    index: int


def gather_hashes(folder: Path, mine: Mapping[str, FileHash]) -> dict[str, FileHash]:
    """Return the hashes of all files that any rank wrote into ``folder`` (collective).

    Rank 0 adds the hash of the index.
    """
    if dist.get_rank() == 0:
        mine = {**mine, INDEX: _hash_file(folder / INDEX)}
    return {name: hashed for part in gather_objects(mine) for name, hashed in sorted(part.items())}


def metadata_text(config: Mapping[str, Any], hashes: Mapping[str, FileHash]) -> str:
    """Text of ``metadata.json``: Megatron's ``config``, the files' hashes and a digest of both."""
    files = {
        name: {"bytes": hashed.num_bytes, hashed.kind.value: list(hashed.chunks)}
        for name, hashed in hashes.items()
    }
    record = {**config, _HASHES: {"chunk_bytes": CHUNK_BYTES, "files": files}}
    digest = hashlib.sha256(_text(record).encode()).hexdigest()
    return _text({**record, _DIGEST: digest})


def read_hashes(folder: Path) -> dict[str, FileHash] | None:
    """Read the sizes and hashes of a checkpoint's files; None if it was saved without hashes.

    Raises Faults if ``metadata.json`` is damaged.
    """
    path = folder / METADATA
    try:
        record = read_json(path, FileKind.CHECKPOINT)
        text = read_text(path, FileKind.CHECKPOINT)
    except FileError as error:
        raise Faults([str(error)]) from error
    if _BACKEND not in record:
        raise Faults([f"{METADATA}: {_BACKEND!r} is missing: content differs from what was saved"])
    if record.keys() <= _MEGATRONS:
        return None
    config = {name: value for name, value in record.items() if name in _MEGATRONS}
    try:
        if record[_HASHES]["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError
        hashes = {name: _file_hash(hashed) for name, hashed in record[_HASHES]["files"].items()}
        if not all(map(is_file_name, hashes)) or text != metadata_text(config, hashes):
            raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError):
        raise Faults([f"{METADATA}: content differs from what was saved"]) from None
    return hashes


def _file_hash(record: Mapping[str, Any]) -> FileHash:
    (kind,) = record.keys() - {"bytes"}
    if len(record[kind]) != _num_chunks(record["bytes"]):
        raise ValueError
    return FileHash(record["bytes"], tuple(record[kind]), HashKind(kind))


def all_chunks(hashes: Mapping[str, FileHash]) -> list[Chunk]:
    """Return the chunks of all files, in the same order on all ranks."""
    return [
        Chunk(name, i) for name, hashed in sorted(hashes.items()) for i in range(len(hashed.chunks))
    ]


def chunks_of(name: str, first: int, num_bytes: int) -> list[Chunk]:
    """Chunks of the file ``name`` that hold ``num_bytes`` bytes from ``first`` on."""
    last = max(first, first + num_bytes - 1)
    return [Chunk(name, i) for i in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1)]


def find_size_faults(folder: Path, hashes: Mapping[str, FileHash] | None) -> Iterator[str]:
    """Faults visible without reading: files missing, of another size, or beyond the saved ones."""
    if hashes is None:
        for path in [folder / INDEX, folder / _LEGACY, *folder.glob("*.distcp")]:
            if os.path.lexists(path) and not path.is_file():
                yield f"{path.name}: not a regular file"
        return
    if os.path.lexists(folder / _LEGACY):
        yield f"{_LEGACY}: not part of the saved checkpoint, but would be read"
    for name, hashed in hashes.items():
        try:
            found = (folder / name).stat()
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{name}: not a regular file"
        elif found.st_size != hashed.num_bytes:
            yield f"{name}: has {found.st_size:,} bytes, {hashed.num_bytes:,} were saved"


def find_hash_faults(
    folder: Path, hashes: Mapping[str, FileHash], chunks: Iterable[Chunk]
) -> Iterator[str]:
    """Faults of files with a chunk among ``chunks`` that is not as saved, each file once."""
    damaged: set[str] = set()
    for chunk in chunks:
        hashed = hashes.get(chunk.name)
        if chunk.name in damaged:
            continue
        if hashed is None or _differs(folder, chunk, hashed):
            damaged.add(chunk.name)
            yield f"{chunk.name}: content differs from what was saved"


def _differs(folder: Path, chunk: Chunk, hashed: FileHash) -> bool:
    try:
        return (
            _hash_chunk(folder / chunk.name, chunk.index, hashed.kind) != hashed.chunks[chunk.index]
        )
    except (OSError, IndexError):  # unreadable, or beyond the saved size
        return True


def _hash_file(path: Path) -> FileHash:
    num_bytes = path.stat().st_size
    chunks = tuple(_hash_chunk(path, i) for i in range(_num_chunks(num_bytes)))
    return FileHash(num_bytes, chunks)


def _num_chunks(num_bytes: int) -> int:
    return max(1, -(-num_bytes // CHUNK_BYTES))


def _hash_chunk(path: Path, index: int, kind: HashKind = HashKind.XXH3) -> str:
    digest, left = kind.begin(), CHUNK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(index * CHUNK_BYTES)
        while left and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
    return str(digest.hexdigest())


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1)
