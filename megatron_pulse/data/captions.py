"""Captions of images as text fields: words without an encoder, or inputs of text encoders.

Without an encoder every word is a fixed random vector: a stand-in for small experiments without a
download. A backbone learns which picture a word goes with. It cannot tell from the states that two
words are alike. For real text encode the captions with a real encoder (CLIP, T5) once, and write
the states into a latent folder.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.data.augmentation import with_tags_in_order
from megatron_pulse.data.dataset import (
    NO_FIELDS,
    DataError,
    Derived,
    DiffusionDataset,
    FieldSpec,
    Variation,
)
from megatron_pulse.data.images.folder import ImageFiles, ImageSize
from megatron_pulse.data.images.metadata import TEXT, Captions, read_captions, uncaptioned
from megatron_pulse.data.images.pairs import read_pairs
from megatron_pulse.encoders.text_recipe import TextParts, is_text

_END = ""
"""Stands behind the last word, as the end token of CLIP and T5 does: no text is without token."""


def split_words(text: str) -> list[str]:
    """Words of ``text`` in lower case: runs of letters and digits of any script."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).lower())


class WordEncoder:
    """Encodes text to those of the requested ``fields`` that are text.

    ``context* [L, d]``: sum of a word vector and a position vector per word. Each is drawn from
    N(0, I) by Philox from a BLAKE2b hash (of the word, of the position) and scaled by 1/sqrt(2). An
    end token follows, then zeros. Words beyond L - 1 are truncated. ``context*_mask [L]``: 1 at
    words and end. ``pooled* [d]``: sum of the word vectors, end included, over the square root of
    their number. Every element has unit variance over words.
    """

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self.fields = {name: spec for name, spec in fields.items() if _encodes(name, spec)}

    def __call__(self, text: str) -> dict[str, Tensor]:
        """The tensor of every field; ``""`` gives the null conditioning, the end token alone."""
        words = split_words(text)
        return {name: _encode(name, spec, words) for name, spec in self.fields.items()}

    def excess(self, text: str) -> int:
        """Largest number of words truncated from a text in any field; 0 if the text fits."""
        rows = [spec.shape[0] for spec in self.fields.values() if len(spec.shape) == 2]
        return max(0, len(split_words(text)) - min(rows) + 1) if rows else 0


def _encodes(name: str, spec: FieldSpec) -> bool:
    vector = name.startswith("pooled") or name.endswith("_mask")
    return is_text(name) and len(spec.shape) == (1 if vector else 2)


def _encode(name: str, spec: FieldSpec, words: list[str]) -> Tensor:
    if name.startswith("pooled"):
        vectors = [_vector("word", word, spec.shape[0]) for word in [*words, _END]]
        pooled = np.sum(vectors, axis=0, dtype=np.float64) / math.sqrt(len(vectors))
        return torch.from_numpy(pooled.astype(np.float32))
    kept = [*words[: spec.shape[0] - 1], _END]
    if name.endswith("_mask"):
        return (torch.arange(spec.shape[0]) < len(kept)).to(spec.torch_dtype)
    states = torch.zeros(spec.shape)
    for i, word in enumerate(kept):
        width = spec.shape[1]
        state = _vector("word", word, width) + _vector("position", str(i), width)
        states[i] = torch.from_numpy(state / np.float32(math.sqrt(2)))
    return states


@lru_cache(maxsize=100_000)
def _vector(kind: str, text: str, width: int) -> np.ndarray:
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=kind.encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
    drawn: np.ndarray = generator.standard_normal(width, dtype=np.float32)
    return drawn


class WordedImages(ImageFiles):
    """Images with captions, which WordEncoder encodes to those of ``fields`` that are text.

    Dropped samples get the encoding of the empty text. The other arguments are those of ImageFiles.
    """

    def __init__(
        self, *args: Any, fields: Mapping[str, FieldSpec] = NO_FIELDS, **given: Any
    ) -> None:
        super().__init__(*args, **given)
        self._take(fields)

    def _take(self, fields: Mapping[str, FieldSpec]) -> None:
        self._encoder = WordEncoder(fields if self.has_captions else NO_FIELDS)
        self.fields = self._encoder.fields

    def resized(
        self, image_size: ImageSize, channels: int, fields: Mapping[str, FieldSpec] = NO_FIELDS
    ) -> Self:
        found = super().resized(image_size, channels)
        found._take(fields)
        return found

    def excess(self, index: int) -> int:
        return self._encoder.excess(self.caption(index))

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        return self._encoder(with_tags_in_order(self.caption(index), variation))

    def null_conditioning(self) -> dict[str, Tensor]:
        return self._encoder("")


class CaptionedImages(WordedImages):
    """Images and captions below ``root`` (see ``images/metadata.py``), encoded by WordEncoder.

    ``fields`` are a backbone's inputs. ``verify`` is that of ImageFiles, ``column`` the caption
    column of lists, ``default`` the caption of images without one. Raises DataError with every
    fault.
    """

    kind = "captions"

    def __init__(
        self,
        root: str | Path,
        image_size: ImageSize,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
        column: str = TEXT,
        default: str = "",
    ) -> None:
        root = Path(root)
        said = self._read(root, column, default)
        if not said.pairs:
            raise DataError(
                f"captioned images {root}",
                ["there are no captions" if root.is_dir() else "it is not a folder"],
                "Give a folder of images with one text file each, with metadata.jsonl (lines "
                '{"file_name": ..., "text": ...}), or with such a metadata.csv. \'pulse data '
                "emoji' makes an example.",
            )
        files, captions = zip(*said.pairs, strict=True)
        groups = [said.groups.get(path, "") for path in files]
        super().__init__(
            root,
            files,
            [0] * len(files),
            1,
            image_size,
            channels,
            verify,
            list(captions),
            groups,
            fields=fields,
        )
        self.cautions = [*said.cautions, *uncaptioned(root, said.bare, default)]

    def _read(self, root: Path, column: str, default: str) -> Captions:
        return read_captions(root, column, default)


class PairedImages(CaptionedImages):
    """Pairs of images of one caption (see ``images/pairs.py``): samples 2k, the winner, and 2k + 1.

    Arguments are those of CaptionedImages.
    """

    kind = "pairs"
    has_pairs = True

    def _read(self, root: Path, column: str, default: str) -> Captions:
        return read_pairs(root, column, default)

    @property
    def deciding_sizes(self) -> Sequence[tuple[int, int] | None]:
        """Size of each pair's winner, for both."""
        own = self.sizes
        return [own[i - i % 2] for i in range(len(own))]

    def ties(self) -> Sequence[Sequence[Hashable]]:
        return [(*tie, ("pair", i // 2)) for i, tie in enumerate(super().ties())]


class Encodes(Protocol):
    """Encoder of one text, or of the empty text, to fields."""

    def __call__(self, text: str) -> dict[str, Tensor]: ...

    def null(self) -> dict[str, Tensor]:
        """Fields of a dropped caption."""

    def excess(self, text: str) -> int:
        """Number of tokens that are truncated from a text."""

    @property
    def parts(self) -> TextParts:
        """Parts of the fields by encoder."""


class Tokenizes(Encodes, Protocol):
    """Tokenizer of one text to int64 ids and masks of the given shapes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def known(self) -> Mapping[str, int]:
        """Vocabulary sizes by the names of ids; ids are smaller."""

    def made_by(self) -> Mapping[str, str]:
        """Provenance of each field, for comparison."""


class EncodesWithPictures(Encodes, Protocol):
    """Encoder of one text and a picture beside it to fields."""

    def __call__(
        self, text: str, negative: bool = False, picture: Tensor | None = None
    ) -> dict[str, Tensor]: ...


_LOOKED_AT = 1000


def cut_short(source: DiffusionDataset) -> list[str]:
    """Warnings about truncated captions among the first 1,000 of each dataset; empty if all fit."""
    warnings = []
    for part in source.members:
        count = min(len(part), _LOOKED_AT)
        if found := [i for i in range(count) if part.excess(i)]:
            warnings.append(
                f"of the first {count} captions {len(found)} exceed the text length of the model "
                f"and are truncated, for example that of {part.describe(found[0])}"
            )
    return warnings


class Encoded(Derived):
    """Samples of ``source``, with ``fields`` that ``encode`` makes from their captions."""

    def __init__(
        self, source: DiffusionDataset, encode: Encodes, fields: Mapping[str, FieldSpec]
    ) -> None:
        super().__init__(source)
        self.fields = {**source.fields, **fields}
        self.text_parts = encode.parts
        self._encode = encode

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        caption = with_tags_in_order(self.caption(index), variation)
        made = self._encode(caption) if caption else self._encode.null()
        return {**self.source.conditioning(index, variation), **made}

    def excess(self, index: int) -> int:
        return self._encode.excess(self.caption(index))

    def null_conditioning(self) -> dict[str, Tensor]:
        return {**self.source.null_conditioning(), **self._encode.null()}


class EncodedWithPictures(Encoded):
    """``Encoded`` of captions that are read beside the sample's reference picture.

    Every picture has its own empty prompt, so that of dropped captions are zeros.
    """

    def __init__(
        self,
        source: DiffusionDataset,
        encode: EncodesWithPictures,
        fields: Mapping[str, FieldSpec],
    ) -> None:
        super().__init__(source, encode, fields)
        self._encode_both = encode

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        given = self.source.conditioning(index, variation)
        caption = with_tags_in_order(self.caption(index), variation)
        return {**given, **self._encode_both(caption, picture=given[REFERENCE_IMAGE])}
