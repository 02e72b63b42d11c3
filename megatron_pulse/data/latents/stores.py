"""Latents of several shapes: a store for each shape below one folder, and their index.

::

  latents/buckets.json   order.npy   512x768/meta.json ...   768x512/meta.json ...

``order.npy`` has the number of each sample's store, in the order of the data that were encoded.
Training on the folder has the same split and order as training on these data.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np

from megatron_pulse.data.dataset import DataError, Size
from megatron_pulse.data.joined import Joined
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.latents.layout import mapped, sha256_of
from megatron_pulse.errors import Faults, faults_in
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, replacing, write_with_checksum
from megatron_pulse.json_validation import Some, Text, validated
from megatron_pulse.paths import is_file_name

INDEX = "buckets.json"
ORDER = "order.npy"
FORMAT = 1
_REMEDY = "Give the 'pulse data write-latents' command again with a new folder."


class Store(TypedDict):
    """Store of one shape: its folder below the index, and the pixels of its pictures."""

    folder: Text
    pixels: Annotated[tuple[Size, Size], "[height, width]"]


class _File(TypedDict):
    format: int
    order_sha256: Text
    stores: Some[Store]


def has_index(root: Path) -> bool:
    """True if a folder holds stores of several shapes."""
    return (root / INDEX).is_file()


def stores_below(root: Path) -> Sequence[Store]:
    """Stores of an index; raises DataError for a damaged one."""
    return _read(root)["stores"]


def store_folders(root: Path) -> list[Path]:
    """Folders of the stores below an index; raises DataError for a damaged one."""
    return [root / store["folder"] for store in stores_below(root)]


def write_index(root: Path, stores: Sequence[Store], order: np.ndarray) -> None:
    """Write the index, unless it is there; raises DataError if another one is."""
    order = order.astype(np.uint16)
    if has_index(root):
        there, faults = _read(root), list[str]()
        if list(there["stores"]) != list(stores):
            named = [", ".join(s["folder"] for s in each) for each in (there["stores"], stores)]
            faults.append(f"it has the shapes {named[0]}, and now {named[1]} are to be written")
        elif not np.array_equal(mapped(root / ORDER), order):
            faults.append("its samples have other shapes, or are others")
        if faults:
            raise DataError(f"latents {root}", faults, "Give the same data, or a new folder.")
        return
    root.mkdir(parents=True, exist_ok=True)
    with replacing(root / ORDER) as beside, open(beside, "wb") as file:
        np.save(file, order)
    digest = sha256_of(root / ORDER)
    content = {"format": FORMAT, "order_sha256": digest, "stores": list(stores)}
    write_with_checksum(root / INDEX, json.dumps(content, indent=1) + "\n")


def _read(root: Path) -> _File:
    what = f"{INDEX} of latents {root}"
    try:
        found = validated(_File, read_json(root / INDEX, FileKind.STORES), complete=True)
        faults = [
            f"{one['folder'][:60]!r} must be a folder below it"
            for one in found["stores"]
            if not is_file_name(one["folder"])
        ]
        if found["format"] != FORMAT:
            faults.append(f"its format is {found['format']}, but this version reads {FORMAT}")
        if sha256_of(root / ORDER) != found["order_sha256"]:
            faults.append(f"{ORDER} differs from what was written (SHA-256)")
        if faults:
            raise Faults(faults)
    except (FileError, Faults, OSError) as error:
        raise DataError(what, faults_in(error), _REMEDY) from error
    return found


class LatentStores(Joined):
    """Samples of the stores below ``root``, in the order of the data that were encoded.

    ``shapes`` are those of the backbone, which ``shape_index`` counts; without them, those of the
    stores. Raises DataError if a store has another shape. ``verify`` is that of LatentFolder.
    """

    def __init__(
        self, root: Path, verify: bool = False, shapes: Sequence[tuple[int, ...]] = ()
    ) -> None:
        self.root = root
        stores = [LatentFolder(folder, verify) for folder in store_folders(root)]
        super().__init__(stores)
        self._store_of: np.ndarray = np.array(mapped(root / ORDER), np.int64)
        counts = np.bincount(self._store_of, minlength=len(stores)).tolist()
        there = [each.image_shape for each in stores]
        faults = []
        if counts != [len(each) for each in stores]:
            faults.append(f"{ORDER} counts {counts} samples, the stores {list(map(len, stores))}")
        taken = list(shapes) or there
        if any(shape not in taken for shape in there):
            named = [", ".join("x".join(map(str, s)) for s in each) for each in (there, taken)]
            faults.append(f"its latents are {named[0]}, the backbone takes {named[1]}")
        if faults:
            remedy = (
                "Give the model the shapes of the data (--pulse-option), or write the data again."
            )
            raise DataError(f"latents {root}", faults, remedy)
        self._shape_of = [taken.index(shape) for shape in there]
        self._place: np.ndarray = np.zeros_like(self._store_of)
        for number, count in enumerate(counts):
            self._place[self._store_of == number] = np.arange(count)
        self.num_shapes = max(len(taken), 2)  # also of one store: its samples are divided
        self._stores = stores
        self.made_by: Mapping[str, str] = stores[0].made_by

    @property
    def members(self) -> tuple[LatentStores, ...]:
        return (self,)

    def _at(self, index: int) -> tuple[int, int]:
        return int(self._store_of[index]), int(self._place[index])

    def shape_index(self, index: int) -> int:
        return self._shape_of[int(self._store_of[index])]

    def pixels_of(self, shape: int) -> tuple[int, int]:
        return self._stores[self._shape_of.index(shape)].pixel_size

    def frames_of(self, shape: int) -> int:
        return self._stores[self._shape_of.index(shape)].frames_of(0)

    def ties(self) -> Sequence[Sequence[Hashable]]:
        own = [store.ties() for store in self._stores]
        found: list[Sequence[Hashable]] = []
        for index in range(len(self)):
            number, place = self._at(index)
            tie = own[number][place]
            # Pairs are counted within a store.
            found.append([(one, number) if _is_pair(one) else one for one in tie])
        return found

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        own = [store.fingerprints(range(len(store))) for store in self._stores]
        return [own[number][place] for number, place in map(self._at, indices)]


def _is_pair(tie: Hashable) -> bool:
    return isinstance(tie, tuple) and tie[0] == "pair"
