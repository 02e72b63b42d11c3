"""Sample sizes of a run: those of ``sample_size`` or ``buckets``, and of patches. Imports no torch.

Sizes count pixels of the latent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER, join_shapes
from megatron_pulse.errors import Faults, faults_in

BUCKETS = "buckets"
"""Option that lists the sizes of microbatches."""
SAMPLES_ARE = "samples are of {0.sizes_text}"
"""Effect of other ``buckets``."""
PATCHWISE = "patchwise"
"""Option that lists the patches of patch-wise training."""
PATCHES_ARE = "steps of training see samples and patches of the sizes {0.sizes_text}"
"""Effect of other ``patchwise``."""
ROTARY = (
    "rotary positions of whole samples are fixed in every block. Train a UNet, DiT, PixArt or SD3"
)
"""Reason why a family has no option ``patchwise``."""
_PATCHES = re.compile(r"([1-9][0-9]?)/([1-9][0-9]?):(0?\.[0-9]{1,9})", re.ASCII)
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


def parse_patches(text: str) -> dict[Fraction, float]:
    """Share of training steps of each patch size, by its fraction of a side: "1/2:0.3,1/4:0.2".

    Raises Faults for malformed and repeated fractions, and for shares that leave none for wholes.
    """
    parts = text.split(",")
    found = [_PATCHES.fullmatch(part) for part in parts]
    faults = [
        f"patchwise: {part[:60]!r} is not FRACTION:SHARE, as in patchwise=1/2:0.3,1/4:0.2"
        for part, match in zip(parts, found, strict=True)
        if match is None
    ]
    pairs = [(Fraction(int(m[1]), int(m[2])), float(m[3])) for m in found if m is not None]
    sides = [side for side, _ in pairs]
    faults += [f"patchwise: {side} is not below 1" for side in sides if side >= 1]
    faults += [f"patchwise: {x} is repeated" for i, x in enumerate(sides) if x in sides[:i]]
    if not all(share for _, share in pairs) or sum(share for _, share in pairs) >= 1:
        faults.append(
            "patchwise: shares must be above 0 and add up to less than 1; the rest of the steps "
            "trains on whole samples"
        )
    if faults:
        raise Faults(faults)
    return dict(pairs)


class SampleSizes:
    """Base of configurations with the options ``sample_size`` and ``buckets``.

    Samples have the sizes of ``buckets``, written "64x96,96x64"; if empty, they are squares of
    ``sample_size``. A family that takes the places of patches also has the option ``patchwise``
    (Patch Diffusion, Wang et al. 2023, 2304.12526). Its fractions of samples follow as sizes.
    """

    sample_size: int
    buckets: str
    patchwise = ""
    patch_size = 1

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each shape of samples.

        Raises Faults for malformed ``buckets`` and ``patchwise``.
        """
        whole = [(self.sample_size, self.sample_size)]
        if self.buckets:
            found = parse_buckets(self.buckets, _SIDES, least=len(_SIDES))
            whole = [(height, width) for height, width in found]
        if not self.patchwise:
            return tuple(whole)
        if len(whole) > 1:
            raise Faults([f"patchwise: takes samples of one size, buckets has {len(whole)}"])
        sides = list(parse_patches(self.patchwise))
        if uneven := [side for side in sides if any((n * side).denominator > 1 for n in whole[0])]:
            height, width = whole[0]
            raise Faults([f"patchwise: {s} of {height}x{width} is not whole" for s in uneven])
        return (*whole, *((int(whole[0][0] * s), int(whole[0][1] * s)) for s in sides))

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of training steps of each of ``sizes``; empty without patches."""
        if not self.patchwise:
            return ()
        shares = parse_patches(self.patchwise).values()
        return (1 - sum(shares), *shares)

    @property
    def patch_fields(self) -> Mapping[str, TensorSpec]:
        """Batch field of a patch's top and left in the whole sample, if there are patches."""
        return {PATCH_CORNER: TensorSpec((2,), dtype="int64")} if self.patchwise else {}

    def chain_of_sizes(self, chain_at: Callable[[int, int], Backbone]) -> Backbone:
        """Chain of all ``sizes``, from ``chain_at(height, width)``."""
        joined = join_shapes([chain_at(*size) for size in self.sizes])
        return replace(joined, shares=self.shares)

    @property
    def sizes_text(self) -> str:
        """``sizes`` in words."""
        return ", ".join(f"{height}x{width}" for height, width in self.sizes)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of patches of each shape of samples."""
        patch = self.patch_size
        return tuple((height // patch, width // patch) for height, width in self.sizes)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Number of patches of each shape of samples."""
        return tuple(rows * columns for rows, columns in self.grids)

    def bucket_faults(self, divisor: int, divisor_text: str) -> list[str]:
        """Faults of ``buckets``; each side must be divisible by ``divisor``, which has a text."""
        try:
            sizes = self.sizes if self.buckets or self.patchwise else ()
        except Faults as error:
            return faults_in(error)
        option = PATCHWISE if self.patchwise else BUCKETS
        return [
            f"{option}: sides must be divisible by {divisor_text}; a sample of height {height} and "
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
