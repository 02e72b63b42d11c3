"""Images whose captions become a backbone's text fields, or inputs of its text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_pulse.data.dataset import Derived, DiffusionDataset, FieldSpec


class Encodes(Protocol):
    """Encoder of one text, or of the empty text, to fields."""

    def __call__(self, text: str) -> dict[str, Tensor]: ...

    def null(self) -> dict[str, Tensor]:
        """Fields of a dropped caption."""


class Tokenizes(Encodes, Protocol):
    """Tokenizer of one text to int64 ids and masks of the given shapes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def known(self) -> Mapping[str, int]:
        """Vocabulary sizes by the names of ids; ids are smaller."""

    def made_by(self) -> Mapping[str, str]:
        """Provenance of each field, for comparison."""

    def excess(self, text: str) -> int:
        """Number of tokens that are truncated from a text."""


_LOOKED_AT = 1000


def cut_short(source: DiffusionDataset, tokenize: Tokenizes) -> list[str]:
    """Warning about truncated captions among the first 1,000; empty if all fit."""
    count = min(len(source), _LOOKED_AT)
    found = [i for i in range(count) if tokenize.excess(source.caption(i))]
    if not found:
        return []
    return [
        f"of the first {count} captions {len(found)} are longer than the text encoders read, and "
        f"are cut off there; one is that of {source.describe(found[0])}"
    ]


class Encoded(Derived):
    """Samples of ``source``, with ``fields`` that ``encode`` makes from their captions."""

    def __init__(
        self, source: DiffusionDataset, encode: Encodes, fields: Mapping[str, FieldSpec]
    ) -> None:
        super().__init__(source)
        self.fields = {**source.fields, **fields}
        self._encode = encode

    def conditioning(self, index: int) -> dict[str, Tensor]:
        caption = self.caption(index)
        made = self._encode(caption) if caption else self._encode.null()
        return {**self.source.conditioning(index), **made}

    def null_conditioning(self) -> dict[str, Tensor]:
        return {**self.source.null_conditioning(), **self._encode.null()}
