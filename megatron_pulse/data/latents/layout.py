"""What a folder of precomputed latents holds: shards, their fields, and ``meta.json``.

Shard i is one ``.npy`` file per field::

    latents/meta.json   latent-00000.npy   label-00000.npy   context-00000.npy   latent-00001.npy
    latents/null-context.npy   hashes-00000.bin

Beside it ``hashes-00000.bin`` has a hash of each row, with which what is read is compared (see
``row_hashes``); shards of earlier versions have none.

Until all shards are there, ``shard-00000.json`` says of each that it is, so that several writers
need not know of each other; then ``meta.json`` has them all.

``picture`` has a hash of each sample's picture file, by which a writer sees that one was edited and
the split of a dataset that several samples are of one; ``group`` one of the name of its group.

Conditioning fields have any names (those that backbones read: ``context``, ``context_mask``,
``pooled``, ...). A field may have a *null* value, the encoding of the empty prompt. bfloat16 is
stored as the uint16 of its bits, since NumPy has no such type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from megatron_pulse.data.dataset import COMPUTE, DataError, FieldSpec
from megatron_pulse.data.latents.schema import meta_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_sealed

FORMAT = 2
META = "meta.json"
FILES = ", files of "
"""In a source before the digest of its files, which folders of earlier versions do not have."""
_RECORDS = "shard-*.json"
RESERVED = (
    *("latent", "label", "null", "image", "index", "noisy", "target", "timesteps", "labels"),
    *("dropped", "pixels", "noise", "posterior", "deviation", "picture", "group"),
)
"""Names that no conditioning field can have."""


class LatentType(StrEnum):
    """How latents, and fields of dtype "compute", are stored."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def stored(self) -> np.dtype:
        """The NumPy type of the bits on disk."""
        return np.dtype("uint16" if self is LatentType.BFLOAT16 else str(self))


@dataclass(frozen=True)
class LatentLayout:
    """What every shard of a folder holds; the part of ``meta.json`` that never changes.

    ``shape`` is ``(c, h, w)``, ``fields`` the conditioning. ``pixel_size`` is the (height, width)
    of the images before they were encoded (None: that of the latents). ``source`` says which
    images they were, ``made_by`` what encoded them (``latent``) and each field (classes, states,
    lengths, digests of weights); both are compared when a writer resumes. Where it ``deviates``,
    latents are means of posteriors, whose standard deviations are kept beside them. ``pictures``
    and ``groups``: whether hashes of pictures and of groups are kept (see above). ``classes``
    are the names of classes by label, where they have any. Raises DataError
    for names that cannot be fields.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: LatentType = LatentType.FLOAT16
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    pixel_size: tuple[int, int] | None = None
    shard_size: int = 1024
    source: str = ""
    made_by: Mapping[str, str] = field(default_factory=dict)
    deviates: bool = False
    pictures: bool = False
    groups: bool = False
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = [f"no field can be called {n!r}" for n in self.fields if n in RESERVED]
        faults += [f"{n!r} is no identifier" for n in self.fields if not n.isidentifier()]
        faults += [
            f"field {name} has dtype {spec.dtype!r}; it must be compute, float32 or int64"
            for name, spec in self.fields.items()
            if spec.dtype not in (COMPUTE, "float32", "int64")
        ]
        if faults:
            raise DataError("latent layout", faults, "Name fields as backbones do.")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the whole numbers that shards hold for each sample."""
        kept = {"label": True, "picture": self.pictures, "group": self.groups}
        return tuple(name for name, there in kept.items() if there)

    def stored(self, name: str) -> np.dtype:
        """The type on disk of a conditioning field."""
        dtype = self.fields[name].dtype
        return LatentType(self.dtype).stored if dtype == COMPUTE else np.dtype(dtype)

    def columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape per sample and type on disk of everything that shards hold."""
        latent = (self.shape, LatentType(self.dtype).stored)
        return {
            "latent": latent,
            **({"deviation": latent} if self.deviates else {}),
            **{name: ((), np.dtype("int64")) for name in self.numbers},
            **{name: (spec.shape, self.stored(name)) for name, spec in self.fields.items()},
        }


@dataclass
class ShardFile:
    """One file, as written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass
class Shard:
    """``count`` samples; a file for each field, and the ``hashes`` of their rows."""

    count: int
    files: dict[str, ShardFile]
    hashes: ShardFile | None = None


@dataclass
class Meta:
    """The content of ``meta.json``; ``complete`` is set by ``LatentWriter.close``.

    ``nulls`` are the files of the fields that have a null value, ``shards`` those from the first to
    the last before one that is missing, ``later`` the others that are there, by number.
    """

    layout: LatentLayout
    nulls: dict[str, ShardFile] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    later: dict[int, Shard] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Samples in all shards."""
        return sum(shard.count for shard in self.numbered.values())

    @property
    def numbered(self) -> dict[int, Shard]:
        """All shards that are there, by number."""
        return dict(enumerate(self.shards)) | self.later

    def without(self, root: Path, numbers: Collection[int]) -> Meta:
        """Write that the shards of these ``numbers`` are not there any more, and are to be."""
        kept = {n: shard for n, shard in self.numbered.items() if n not in numbers}
        left = Meta(self.layout, self.nulls)
        for number in numbers:
            (root / _RECORDS.replace("*", f"{number:05d}")).unlink(missing_ok=True)
        for number, shard in kept.items():
            left.record(root, number, shard)
        _write(root / META, left.to_dict() | {"shards": []})
        return left

    def add(self, number: int, shard: Shard) -> None:
        """Count a shard as there."""
        if number >= len(self.shards):
            self.later[number] = shard
        while len(self.shards) in self.later:
            self.shards.append(self.later.pop(len(self.shards)))

    def to_dict(self) -> dict[str, Any]:
        """What ``meta.json`` says."""
        said = asdict(self)
        del said["later"]
        return {"format": FORMAT, **said}

    def save(self, root: Path) -> None:
        """Write ``meta.json``, whole; complete, it makes records of shards needless."""
        _write(root / META, self.to_dict())
        if self.complete:
            for path in root.glob(_RECORDS):
                path.unlink(missing_ok=True)

    def record(self, root: Path, number: int, shard: Shard) -> None:
        """Write that a shard of this folder is there."""
        content = {"of": self._key(), "number": number, "shard": asdict(shard)}
        _write(root / _RECORDS.replace("*", f"{number:05d}"), content)
        self.add(number, shard)

    def _key(self) -> str:
        """What tells a folder from another that was at its place, whose records are still there."""
        said = {"nulls": {k: asdict(file) for k, file in self.nulls.items()}}
        text = json.dumps(asdict(self.layout) | said, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, root: Path) -> Meta:
        """Read ``meta.json``, and the records of shards where it is not complete; raises DataError
        with every fault if it is not one of ours."""
        try:
            record = read_json(root / META, FileKind.LATENTS)
            if (form := record.get("format")) != FORMAT:
                told = f"its format is {str(form)[:40]}, and this version of megatron_pulse reads"
                raise DataError(f"{META} of latents {root}", [f"{told} {FORMAT} only"], _REMEDY)
            if faults := meta_faults(record, FORMAT, list(LatentType)):
                raise DataError(f"{META} of latents {root}", faults, _REMEDY)
            nulls = {name: ShardFile(**file) for name, file in record["nulls"].items()}
            shards = [_shard(said) for said in record["shards"]]
            meta = cls(_layout(record["layout"]), nulls, shards, record["complete"])
            for number, said in _recorded(root, meta._key()) if not meta.complete else ():
                if not meta_faults(record | {"shards": [said]}, FORMAT, list(LatentType)):
                    meta.add(number, _shard(said))
            return meta
        except (FileError, TypeError) as error:  # TypeError: a layout of another version
            raise DataError(f"{META} of latents {root}", [str(error)], _REMEDY) from error


def mapped(path: Path) -> np.ndarray:
    """A ``.npy`` file, mapped; raises ValueError in one sentence where it is none."""
    try:
        found: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # also of Python's parser and tokenizer, which read its header
        raise ValueError(f"{path.name} is no .npy file: {' '.join(str(error).split())}") from error
    return found


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recorded(root: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of all shards that are told to be there; who wrote half a record will
    write its shard again."""
    for path in sorted(root.glob(_RECORDS)):
        with suppress(FileError):
            said = read_json(path, FileKind.LATENTS)
            number = said.get("number")
            if said.get("of") == key and isinstance(number, int) and number >= 0:
                yield number, said.get("shard", {})


def _write(path: Path, content: dict[str, Any]) -> None:
    write_sealed(path, json.dumps(content, indent=1) + "\n")


def _shard(said: dict[str, Any]) -> Shard:
    files = {name: ShardFile(**file) for name, file in said["files"].items()}
    hashes = said.get("hashes")
    return Shard(said["count"], files, None if hashes is None else ShardFile(**hashes))


_REMEDY = (
    "Write the folder anew with megatron_pulse.data.latents.writer.LatentWriter, or with "
    "'pulse data write-latents'."
)


def _layout(record: dict[str, Any]) -> LatentLayout:
    size = record["pixel_size"]
    return LatentLayout(
        **record
        | {
            "shape": tuple(record["shape"]),
            "dtype": LatentType(record["dtype"]),
            "fields": {
                name: FieldSpec(tuple(spec["shape"]), spec["dtype"])
                for name, spec in record["fields"].items()
            },
            "classes": tuple(record.get("classes", ())),
            "pixel_size": None if size is None else (size[0], size[1]),
        }
    )
