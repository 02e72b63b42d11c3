"""Sample sizes of a run: the square of ``sample_size``, or those of ``buckets``. Imports no torch.

Sizes count pixels of the latent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_pulse.errors import Faults, faults_in

BUCKETS = "buckets"
"""Option that lists the sizes of microbatches."""
SAMPLES_ARE = "samples are of {0.sizes_text}"
"""Effect of other ``buckets``."""
_SIDES = ("height", "width")
_SIDE = re.compile("[1-9][0-9]{0,6}", re.ASCII)


def parse_buckets(text: str, names: Sequence[str], least: int = 1) -> list[tuple[int, ...]]:
    """Sizes in ``buckets``, written "64x96,96x64"; each has ``least`` or more sides of ``names``.

    Raises Faults for malformed and for repeated sizes.
    """
    parts = text.split(",")
    sizes = [part.split("x") for part in parts]
    form = "x".join(name.upper() for name in names)
    faults = {
        f"buckets: {part[:60]!r} is not {form}, as in buckets=64x96,96x64": None
        for part, size in zip(parts, sizes, strict=True)
        if not (least <= len(size) <= len(names) and all(map(_SIDE.fullmatch, size)))
    }
    if not faults:
        repeated = (part for i, part in enumerate(parts) if part in parts[:i])
        faults = {f"buckets: {part} is repeated. Give it once": None for part in repeated}
    if faults:
        raise Faults(list(faults))
    return [tuple(map(int, size)) for size in sizes]


class SampleSizes:
    """Base of configurations with the options ``sample_size`` and ``buckets``.

    Samples have the sizes of ``buckets``, written "64x96,96x64"; if empty, they are squares of
    ``sample_size``.
    """

    sample_size: int
    buckets: str
    patch_size = 1

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each shape of samples. Raises Faults for malformed ``buckets``."""
        if not self.buckets:
            return ((self.sample_size, self.sample_size),)
        found = parse_buckets(self.buckets, _SIDES, least=len(_SIDES))
        return tuple((height, width) for height, width in found)

    @property
    def sizes_text(self) -> str:
        """``sizes`` in words."""
        return ", ".join(f"{height}x{width}" for height, width in self.sizes)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of patches of each shape of samples."""
        patch = self.patch_size
        return tuple((height // patch, width // patch) for height, width in self.sizes)

    def bucket_faults(self, divisor: int, divisor_text: str) -> list[str]:
        """Faults of ``buckets``; each side must be divisible by ``divisor``, which has a text."""
        try:
            sizes = self.sizes if self.buckets else ()
        except Faults as error:
            return faults_in(error)
        return [
            f"buckets: sides must be divisible by {divisor_text}; a sample of height {height} and "
            f"width {width} is not"
            for height, width in sizes
            if height % divisor or width % divisor
        ]

    def faults_beyond(self, most: int, most_text: str) -> list[str]:
        """Faults of sizes with more rows or columns of patches than ``most``, which has a text."""
        if self.bucket_faults(1, ""):
            return []  # reported there
        option = BUCKETS if self.buckets else "sample_size"
        return [
            f"{option}: {max(grid)} patches per side exceed {most_text}"
            for grid in self.grids
            if max(grid) > most
        ]
