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

    def made_by(self) -> Mapping[str, str]:
        """What makes each, so that others can be told from it."""


class Encoded(Derived):
    """The samples of ``source``, with ``fields`` that ``encode`` makes of their captions."""

    def __init__(
        self, source: DiffusionDataset, encode: Encodes, fields: Mapping[str, FieldSpec]
    ) -> None:
        super().__init__(source)
        self.fields = {**source.fields, **fields}
        self._encode = encode

    def conditioning(self, index: int) -> dict[str, Tensor]:
        return {**self.source.conditioning(index), **self._encode(self.caption(index))}

    def null_conditioning(self) -> dict[str, Tensor]:
        return {**self.source.null_conditioning(), **self._encode.null()}
