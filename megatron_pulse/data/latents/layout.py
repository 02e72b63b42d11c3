"""Layout of a folder of precomputed latents: shards, their fields, and ``meta.json``.

Shard i is one ``.npy`` file per field::

  latents/meta.json   latent-00000.npy   label-00000.npy   context-00000.npy   latent-00001.npy
  latents/null-context.npy   hashes-00000.bin

``hashes-00000.bin`` holds a hash of each row of the shard, to check rows when they are read (see
``row_hashes``). Shards of earlier versions have none.

Until all shards exist, each has a record ``shard-00000.json``, so that several writers need not
know of each other. Then ``meta.json`` lists all shards.

``picture`` holds a hash of each sample's picture file. A writer thereby detects edited pictures,
and a dataset's split keeps samples of one picture together. ``group`` holds a hash of the name of
the sample's group.

Conditioning fields have any names (those that backbones read: ``context``, ``context_mask``,
``pooled``, ...). A field may have a *null* value, the encoding of the empty prompt. bfloat16 is
stored as the uint16 of its bits, since NumPy has no such type.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypedDict

import numpy as np
from annotated_types import Ge, Le

from megatron_pulse.data.dataset import COMPUTE, DataError, FieldSpec, Size
from megatron_pulse.errors import Faults, faults_in
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.json_validation import Count, Natural, Some, Text, validated
from megatron_pulse.paths import is_file_name

FORMAT = 2
META = "meta.json"
FILES = ", files of "
"""Separator in a source before the digest of its files; absent in folders of earlier versions."""
_RECORDS = "shard-*.json"
RESERVED = (
    *("latent", "label", "null", "image", "index", "noisy", "target", "timesteps", "labels"),
    *("dropped", "pixels", "noise", "posterior", "deviation", "picture", "group"),
    *("mirrored_latent", "mirrored_deviation"),
)
"""Names that no conditioning field can have."""


_Part = list[tuple[Natural, Natural]]
"""(start, stop) in every dimension of a field."""

MIRRORED = "mirrored_"
"""Prefix of the columns of mirrored pictures."""


class LatentType(StrEnum):
    """Storage dtype of latents and of fields with dtype "compute"."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def stored(self) -> np.dtype:
        """NumPy dtype of the bits on disk."""
        return np.dtype("uint16" if self is LatentType.BFLOAT16 else str(self))


@dataclass(frozen=True)
class LatentLayout:
    """Content of every shard of a folder; the constant part of ``meta.json``.

    ``shape`` is ``(c, h, w)``, ``fields`` the conditioning. ``pixel_size`` is the (height, width)
    of the images before encoding (None: that of the latents). ``source`` identifies the images.
    ``made_by`` is the provenance of ``latent`` and of each field: classes, states, lengths, digests
    of weights. A resuming writer compares both.

    With ``deviates``, latents are means of posteriors, stored with their standard deviations. With
    ``pictures`` and ``groups``, hashes of pictures and of groups are stored (see above). With
    ``pairs``, samples 2k and 2k + 1 are the winner and the loser of a pair. If ``mirrored``,
    latents of mirrored pictures are stored too. Raises DataError for invalid field names.
    """

    shape: Some[Size]
    num_classes: Annotated[int, Ge(0), Le(1 << 30)]
    dtype: LatentType = LatentType.FLOAT16
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    pixel_size: Annotated[tuple[Size, Size], "[height, width]"] | None = None
    shard_size: Count = 1024
    source: str = ""
    made_by: Mapping[str, str] = field(default_factory=dict)
    deviates: bool = False
    pictures: bool = False
    groups: bool = False
    classes: tuple[Text, ...] = ()
    pairs: bool = False
    mirrored: bool = False

    def __post_init__(self) -> None:
        faults = [f"not allowed as a field name: {n!r}" for n in self.fields if n in RESERVED]
        faults += [f"{n!r} is not an identifier" for n in self.fields if not n.isidentifier()]
        faults += [
            f"field {name} has dtype {spec.dtype!r}; it must be compute, float32 or int64"
            for name, spec in self.fields.items()
            if spec.dtype not in (COMPUTE, "float32", "int64")
        ]
        if faults:
            raise DataError("latent layout", faults, "Use the field names of the backbone.")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the integer columns of a shard."""
        kept = {"label": True, "picture": self.pictures, "group": self.groups}
        return tuple(name for name, there in kept.items() if there)

    def stored(self, name: str) -> np.dtype:
        """dtype on disk of a conditioning field."""
        dtype = self.fields[name].dtype
        return LatentType(self.dtype).stored if dtype == COMPUTE else np.dtype(dtype)

    def columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape per sample and dtype on disk of every column of a shard."""
        latent = (self.shape, LatentType(self.dtype).stored)
        return {
            "latent": latent,
            **({"deviation": latent} if self.deviates else {}),
            **({f"{MIRRORED}latent": latent} if self.mirrored else {}),
            **({f"{MIRRORED}deviation": latent} if self.mirrored and self.deviates else {}),
            **{name: ((), np.dtype("int64")) for name in self.numbers},
            **{name: (spec.shape, self.stored(name)) for name, spec in self.fields.items()},
        }


@dataclass
class ShardFile:
    """File of a shard, with its size and hash as written."""

    name: Text
    num_bytes: Natural
    sha256: Text


@dataclass
class Shard:
    """Shard of ``count`` samples; a file for each field, and the ``hashes`` of their rows."""

    count: Annotated[int, Ge(1), Le(1 << 40)]
    files: dict[str, ShardFile]
    hashes: ShardFile | None = None


@dataclass
class Meta:
    """Content of ``meta.json``; ``LatentWriter.close`` sets ``complete``.

    ``nulls`` are the files of fields with a null value. ``shards`` are the shards before the first
    missing one, ``later`` the others on disk, by number. ``text_parts`` are the parts of fields by
    text encoder; folders of earlier versions have none.
    """

    layout: LatentLayout
    nulls: dict[str, ShardFile] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    text_parts: dict[str, dict[str, list[_Part]]] = field(default_factory=dict)
    later: dict[int, Shard] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.count for shard in self.numbered.values())

    @property
    def numbered(self) -> dict[int, Shard]:
        """All existing shards by number."""
        return dict(enumerate(self.shards)) | self.later

    def without(self, root: Path, numbers: Collection[int]) -> Meta:
        """Remove the shards of these ``numbers`` from the records, so that they are
        written again."""
        kept = {n: shard for n, shard in self.numbered.items() if n not in numbers}
        left = Meta(self.layout, self.nulls, text_parts=self.text_parts)
        for number in numbers:
            (root / _RECORDS.replace("*", f"{number:05d}")).unlink(missing_ok=True)
        for number, shard in kept.items():
            left.record(root, number, shard)
        _write(root / META, left.to_dict() | {"shards": []})
        return left

    def add(self, number: int, shard: Shard) -> None:
        """Count a shard as written."""
        if number >= len(self.shards):
            self.later[number] = shard
        while len(self.shards) in self.later:
            self.shards.append(self.later.pop(len(self.shards)))

    def to_dict(self) -> dict[str, Any]:
        """Content of ``meta.json`` as plain values."""
        said = asdict(self)
        del said["later"]
        return {"format": FORMAT, **said}

    def save(self, root: Path) -> None:
        """Write ``meta.json`` atomically; if complete, also delete the records of shards."""
        _write(root / META, self.to_dict())
        if self.complete:
            for path in root.glob(_RECORDS):
                path.unlink(missing_ok=True)

    def record(self, root: Path, number: int, shard: Shard) -> None:
        """Record on disk that a shard of this folder is written."""
        content = {"of": self._key(), "number": number, "shard": asdict(shard)}
        _write(root / _RECORDS.replace("*", f"{number:05d}"), content)
        self.add(number, shard)

    def _key(self) -> str:
        """Key of this folder's shard records, to ignore records of an earlier folder at the same
        path.
        """
        said = {"nulls": {k: asdict(file) for k, file in self.nulls.items()}}
        text = json.dumps(asdict(self.layout) | said, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, root: Path) -> Meta:
        """Read ``meta.json``, and the records of shards unless it is complete.

        Raises DataError with every fault if the file is invalid.
        """
        if not os.path.lexists(root):
            raise DataError(f"latents {root}", ["there is no such folder"], _missing(root))
        try:
            record = read_json(root / META, FileKind.LATENTS)
            if (form := record.get("format")) != FORMAT:
                told = f"its format is {str(form)[:40]}, but this version of megatron_pulse reads"
                raise DataError(f"{META} of latents {root}", [f"{told} {FORMAT} only"], _REMEDY)
            found = validated(_File, _with_current_form(record), complete=True)
            meta = cls(**found)
            if faults := list(_misfits(meta)):
                raise Faults(faults)
            for number, said in _recorded(root, meta._key()) if not meta.complete else ():
                with suppress(Faults):
                    shard = validated(Shard, {"hashes": None, **said}, complete=True)
                    if not any(_misfits(cls(meta.layout, {}, [shard]))):
                        meta.add(number, shard)
            return meta
        except (FileError, Faults) as error:
            raise DataError(f"{META} of latents {root}", faults_in(error), _REMEDY) from error


class _File(TypedDict):
    layout: LatentLayout
    nulls: dict[str, ShardFile]
    shards: list[Shard]
    complete: bool
    text_parts: dict[str, dict[str, list[_Part]]]


def _with_current_form(record: dict[str, Any]) -> dict[str, Any]:
    """Content of ``meta.json``, with what earlier versions lacked."""
    found = {"text_parts": {}, **record}
    del found["format"]
    absent = dict.fromkeys(("deviates", "pictures", "groups", "pairs", "mirrored"), False)
    older = {"made_by": {}, "classes": [], **absent}
    if isinstance(layout := found.get("layout"), dict):
        found["layout"] = {**older, **layout}
    if isinstance(shards := found.get("shards"), list):
        found["shards"] = [{"hashes": None, **s} if isinstance(s, dict) else s for s in shards]
    return found


def _misfits(meta: Meta) -> Iterator[str]:
    """Faults of files outside the folder, and of fields without a file."""
    columns = meta.layout.columns().keys()
    places = [("nulls", meta.nulls)]
    for i, shard in enumerate(meta.shards):
        places.append((f"shards.{i}.files", shard.files))
        if shard.hashes is not None:
            places.append((f"shards.{i}", {"hashes": shard.hashes}))
        for name in sorted(columns ^ shard.files.keys()):
            has = "is of no field" if name in shard.files else "is missing"
            yield f"shards.{i}.files.{name} {has}"
    for name in meta.nulls.keys() - meta.layout.fields.keys():
        yield f"nulls.{name} is of no field"
    for encoder, parts in meta.text_parts.items():
        for name, part in ((name, part) for name, those in parts.items() for part in those):
            shape = meta.layout.fields[name].shape if name in meta.layout.fields else ()
            fits = len(part) == len(shape) > 0
            if not fits or any(a >= b or b > n for (a, b), n in zip(part, shape, strict=True)):
                yield f"text_parts.{encoder}.{name} {part} is no part of a field"
    for where, files in places:
        for field_name, file in files.items():
            if not is_file_name(file.name):
                told = f"is {file.name[:60]!r}; it must be a file in the folder"
                yield f"{where}.{field_name}.name {told}"


def mapped(path: Path) -> np.ndarray:
    """Memory-map a ``.npy`` file; raises ValueError with a one-line text for other files."""
    try:
        found: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # including errors of Python's parser, which reads the header
        raise ValueError(
            f"{path.name} is not a .npy file: {' '.join(str(error).split())}"
        ) from error
    return found


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recorded(root: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of all recorded shards.

    Half-written records are skipped; their writer writes the shard again.
    """
    for path in sorted(root.glob(_RECORDS)):
        with suppress(FileError):
            said = read_json(path, FileKind.LATENTS)
            number = said.get("number")
            if said.get("of") == key and isinstance(number, int) and number >= 0:
                yield number, said.get("shard", {})


def _write(path: Path, content: dict[str, Any]) -> None:
    write_with_checksum(path, json.dumps(content, indent=1) + "\n")


_REMEDY = "Write the folder anew with 'pulse data write-latents'."


def _missing(root: Path) -> str:
    command = f"pulse data write-latents --from folder:PICTURES --vae DIR -o {quote(str(root))}"
    return f"Name another, or write it: '{command}'"
