"""Augmentation: random changes of samples, as a function of (seed, sample, position)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.data.dataset import Variation, permutation
from megatron_pulse.diffusion.noise import Stream, philox

_UNIT = 2.0**-64


@dataclass(frozen=True)
class Augmentation:
    """Changes that training draws at every visit of a sample.

    - ``flip``: probability of mirroring a picture.

    - ``random_crop``: crop pictures anywhere, in place of the centre.

    - ``shuffle_tags``: reorder the comma-separated tags of captions after the first ``keep_tags``.

    - ``patchwise``: draw the place of a patch (see ``patchwise.py``).

    - ``random_start``: draw the place of a clip in its film, in place of the middle.
    """

    flip: float = 0.0
    random_crop: bool = False
    shuffle_tags: bool = False
    keep_tags: int = 0
    patchwise: bool = False
    random_start: bool = False

    @property
    def changes_samples(self) -> bool:
        """True if anything is drawn."""
        drawn = self.random_crop, self.patchwise, self.shuffle_tags, self.random_start
        return bool(self.flip) or any(drawn)

    def draw(self, seed: int, index: int, position: int) -> Variation | None:
        """Variation of a sample at a position of the run; None without augmentation."""
        if not self.changes_samples:
            return None
        words = philox(seed, Stream.VARIATION, index, position).random_raw(7)
        flip, down, across, order, *patch, start = words
        return Variation(
            flip=float(flip) * _UNIT < self.flip,
            crop=(float(down) * _UNIT, float(across) * _UNIT) if self.random_crop else None,
            tag_order=int(order) if self.shuffle_tags else None,
            keep_tags=self.keep_tags,
            patch=(float(patch[0]) * _UNIT, float(patch[1]) * _UNIT) if self.patchwise else None,
            start=float(start) * _UNIT if self.random_start else None,
        )


NO_AUGMENTATION = Augmentation()


def with_tags_in_order(caption: str, variation: Variation | None) -> str:
    """``caption`` with its tags in the order that ``variation`` draws."""
    if variation is None or variation.tag_order is None:
        return caption
    tags = [tag.strip() for tag in caption.split(",")]
    kept, others = tags[: variation.keep_tags], tags[variation.keep_tags :]
    order = permutation(len(others), variation.tag_order, epoch=0)
    return ", ".join([*kept, *(others[i] for i in order)])
