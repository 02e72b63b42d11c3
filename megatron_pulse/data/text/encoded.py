"""Images whose captions become what a backbone reads, or what its text encoders read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_pulse.data.dataset import Derived, DiffusionDataset, FieldSpec


class Encodes(Protocol):
    """Makes fields of one text, and of none."""

    def __call__(self, text: str) -> dict[str, Tensor]: ...

    def null(self) -> dict[str, Tensor]:
        """What a dropped caption becomes."""


class Tokenizes(Encodes, Protocol):
    """Makes token ids and masks, all int64, of these shapes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def known(self) -> Mapping[str, int]:
        """How many tokens there are, by the names of ids: these are below."""

    def made_by(self) -> Mapping[str, str]:
        """What makes each, so that others can be told from it."""

    def excess(self, text: str) -> int:
        """By how many tokens a text is longer than what is left of it."""


_LOOKED_AT = 1000


def cut_short(source: DiffusionDataset, tokenize: Tokenizes) -> list[str]:
    """What to say of captions, among the first 1,000, that are longer than what is left of them."""
    count = min(len(source), _LOOKED_AT)
    found = [i for i in range(count) if tokenize.excess(source.caption(i))]
    if not found:
        return []
    return [
        f"of the first {count} captions {len(found)} are longer than the text encoders read, and "
        f"are cut off there; one is that of {source.describe(found[0])}"
    ]


class Encoded(Derived):
    """The samples of ``source``, with ``fields`` that ``encode`` makes of their captions."""

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
