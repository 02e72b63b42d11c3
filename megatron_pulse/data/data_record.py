"""Record of a run's data, by which a continued run detects that its data changed."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypedDict

import numpy as np
import xxhash

from megatron_pulse.data.dataset import LATENT, DiffusionDataset
from megatron_pulse.json_validation import Natural, faults_of

MOST_LISTED = 4096
"""Samples: of so many a record lists the hashes, 32 KB in each checkpoint. Of more it has one
digest, and what was added and removed cannot be told apart."""
_HASH_DIGITS = 8
_NAMED = 3


@dataclass(frozen=True)
class DataRecord:
    """Record of one dataset.

    - ``num_train``, ``num_validation``: sample counts.

    - ``classes``: class names by label.

    - ``digest``: hash of the samples in their order; empty if samples have no files.

    - ``samples``: hash of each sample, training first; empty for many samples or without files.

    - ``made_by``: provenance of precomputed latents (``latent``) and fields that the run reads;
      None in checkpoints of earlier versions.
    """

    num_train: Natural
    num_validation: Natural
    classes: tuple[str, ...] = ()
    digest: str = ""
    samples: str = ""
    made_by: Mapping[str, str] | None = None

    @property
    def train(self) -> list[str]:
        """Hashes of the samples that are trained on."""
        return _split(self.samples)[: self.num_train]

    @property
    def validation(self) -> list[str]:
        """Hashes of the validation samples."""
        return _split(self.samples)[self.num_train :]


def record_of(
    train: DiffusionDataset, validation: DiffusionDataset, labelled: bool, whole: bool
) -> DataRecord:
    """Record of one dataset.

    Classes are recorded if samples are ``labelled``. Unless ``whole``, no file is read, and the
    digest is missing.
    """
    sides = (train, validation)
    classes = tuple(train.class_names) if labelled else ()
    hashes: list[int] = []
    for side in sides if whole else ():
        hashes += side.fingerprints(range(len(side)))
    digest = samples = ""
    if hashes:
        summed = xxhash.xxh3_64(np.array(hashes, np.uint64).tobytes())
        if classes:
            labels = [side.label(i) for side in sides for i in range(len(side))]
            summed.update(np.array(labels, np.int64).tobytes())
        digest = summed.hexdigest()
    if 0 < len(hashes) <= MOST_LISTED:
        samples = "".join(f"{each:016x}"[-_HASH_DIGITS:] for each in hashes)
    return DataRecord(len(train), len(validation), classes, digest, samples, read_provenance(train))


def read_provenance(dataset: DiffusionDataset) -> dict[str, str]:
    """Provenance of the dataset's latents and of the fields that a run reads of it."""
    read = {LATENT, *dataset.fields}
    return {name: text for name, text in dataset.made_by.items() if name in read}


def to_saved(records: Mapping[str, Sequence[DataRecord]]) -> dict[str, list[dict[str, Any]]]:
    """Records by chain as a run's flags keep them."""
    return {
        name: [asdict(one) | {"classes": list(one.classes)} for one in each]
        for name, each in records.items()
    }


def saved_faults(saved: Any) -> list[str]:
    """Faults of a value that ``to_saved`` has not made; ``made_by`` may be missing."""
    if isinstance(saved, dict):
        saved = {
            name: [{"made_by": None, **one} if isinstance(one, dict) else one for one in each]
            if isinstance(each, list)
            else each
            for name, each in saved.items()
        }
    named = {"pulse_data_record": saved}
    return faults_of(_Saved, named, complete=True)


class _Saved(TypedDict):
    pulse_data_record: Mapping[str, tuple[DataRecord, ...]]


def recorded_data(arguments: argparse.Namespace) -> Mapping[str, Sequence[DataRecord]]:
    """Records of a saved run's data by chain; empty if it recorded none."""
    saved = getattr(arguments, "pulse_data_record", None) or {}
    return {
        name: [DataRecord(**one | {"classes": tuple(one["classes"])}) for one in each]
        for name, each in saved.items()
    }


def recorded_provenance(records: Sequence[DataRecord]) -> dict[str, str] | None:
    """Provenance of the latents and fields of a run's datasets; None if not recorded."""
    known = [one.made_by for one in records if one.made_by is not None]
    return {name: text for each in known for name, text in each.items()} if known else None


def moved_classes(before: Sequence[DataRecord], now: Sequence[DataRecord]) -> str:
    """Classes whose names have other labels than before; empty if there are none."""
    old, new = _labels(before), _labels(now)
    moved = [name for name in new if name in old and new[name] != old[name]]
    told = [f"{name} is class {new[name]} (was {old[name]})" for name in moved[:_NAMED]]
    more = [f"{len(moved) - _NAMED} more"] if len(moved) > _NAMED else []
    return ", ".join([*told, *more])


def describe_changes(before: Sequence[DataRecord], now: Sequence[DataRecord]) -> list[str]:
    """Descriptions of all differences between two states of the data."""
    found = []
    old, new = _labels(before), _labels(now)
    if old != new and not moved_classes(before, now):
        found.append(f"classes: {_names(new)} (was {_names(old)})")
    if said := _changed_samples(before, now):
        found.append(said)
    return found


def _changed_samples(before: Sequence[DataRecord], now: Sequence[DataRecord]) -> str:
    was, are = _counts(before), _counts(now)
    if was == are and [one.digest for one in before] == [one.digest for one in now]:
        return ""
    counts = (
        f"samples: {are[0]:,} for training, {are[1]:,} for validation (was {was[0]:,} and "
        f"{was[1]:,})"
    )
    if not all(one.samples for one in (*before, *now)):
        return counts if was != are else f"{counts}, other samples or another order"
    trained_before = Counter(chain.from_iterable(one.train for one in before))
    held_back = Counter(chain.from_iterable(one.validation for one in now))
    old = trained_before + Counter(chain.from_iterable(one.validation for one in before))
    new = held_back + Counter(chain.from_iterable(one.train for one in now))
    added, removed = new - old, old - new
    if not added and not removed:
        said = "in another order"
    else:
        said = f"{added.total():,} added, {removed.total():,} removed"
    leaked = (trained_before & held_back).total()
    return f"{counts}, {said}" + (
        (f"; {leaked:,} validation samples were trained on") if leaked else ""
    )


def _counts(records: Sequence[DataRecord]) -> tuple[int, int]:
    return sum(one.num_train for one in records), sum(one.num_validation for one in records)


def _labels(records: Sequence[DataRecord]) -> dict[str, int]:
    """Labels by class name, in order."""
    return {name: label for one in records for label, name in enumerate(one.classes)}


def _names(labels: Mapping[str, int]) -> str:
    shown = ", ".join([*labels][:10])
    return f"{shown}, ... ({len(labels)})" if len(labels) > 10 else shown or "none with names"


def _split(samples: str) -> list[str]:
    return [samples[i : i + _HASH_DIGITS] for i in range(0, len(samples), _HASH_DIGITS)]
