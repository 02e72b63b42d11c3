"""What a backbone reads of a prompt: which encoders, which of their states. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json


class ComponentKind(StrEnum):
    """What stands at a place of a pipeline, by transformers' classes."""

    CLIP = "CLIPTextModel"
    PROJECTED_CLIP = "CLIPTextModelWithProjection"
    T5 = "T5EncoderModel"
    BERT = "BertModel"


class State(StrEnum):
    """What is taken of an encoder."""

    LAST = "last"
    """The states after the last layer and the final norm, ``[length, width]``."""
    PENULTIMATE = "penultimate"
    """The states before the last layer, without a norm, ``[length, width]``."""
    POOLED = "pooled"
    """The end token's last state, through the projection where there is one: ``[width]``."""
    MASK = "mask"
    """1 at the text's tokens, 0 at padding: ``[length]``."""


@dataclass(frozen=True)
class Part:
    """A state of the encoder at a place (1: ``text_encoder``, 2: ``text_encoder_2`` ...)."""

    place: int
    state: State

    def __str__(self) -> str:
        return f"{folder_name('text_encoder', self.place)} {self.state}"


Row = tuple[Part, ...]
"""States joined along their width."""


@dataclass(frozen=True)
class TextRecipe:
    """How the text ``fields`` of a backbone are made of the encoders at its places.

    A field is rows of states. Rows are padded with zeros to the widest and follow each other along
    the sequence. ``kinds`` are the encoders by place. Places in ``masked`` attend only to the
    text's own tokens; if ``masked_if_said``, so do those whose config.json says
    ``use_attention_mask``. Places in ``fitted`` are padded to what is left of the field's length,
    those in ``padded_as`` as another place, the others to what their tokenizer says.
    ``zeros_if_empty``: without a prompt the states are zeros where the pipeline's
    ``force_zeros_for_empty_prompt`` (true by default) says so; else they are the encoding of "".
    ``cleans``: texts are cleaned (see ``cleaning.py``).
    ``inversions``: a token of textual inversion stands for all its vectors.
    ``length_option`` is what the backbone calls the option that says how long its texts are; empty
    where it has none.
    """

    fields: Mapping[str, tuple[Row, ...]]
    kinds: Mapping[int, ComponentKind]
    masked: frozenset[int] = frozenset()
    fitted: frozenset[int] = frozenset()
    padded_as: Mapping[int, int] = field(default_factory=dict)
    masked_if_said: bool = False
    zeros_if_empty: bool = False
    cleans: bool = False
    inversions: bool = False
    length_option: str = field(default="", compare=False)

    def parts(self) -> Iterator[Part]:
        """Of all fields."""
        for rows in self.fields.values():
            for row in rows:
                yield from row

    def states_of(self, place: int) -> frozenset[State]:
        """What is taken of one encoder."""
        return frozenset(part.state for part in self.parts() if part.place == place)

    def of(self, field: str, place: int) -> str:
        """Which states of one encoder are in a field, in words; empty if none is."""
        found = [part.state for row in self.fields[field] for part in row if part.place == place]
        return " and ".join(dict.fromkeys(found))

    def told(self, field: str) -> str:
        """What a field is made of, in words."""
        return ", then ".join(" + ".join(map(str, row)) for row in self.fields[field])


LONGEST = 1 << 14
"""Tokens; tokenizers that say no length say a much larger one."""


def length_said(number: object) -> int | None:
    """A ``model_max_length`` that is a number of tokens; None of another."""
    return int(number) if isinstance(number, int | float) and 1 <= number <= LONGEST else None


def padded_length(tokenizer: Path) -> int | None:
    """Number of tokens the tokenizer of a folder pads to; None if its settings do not say."""
    try:
        settings = read_json(tokenizer / "tokenizer_config.json", FileKind.MODEL)
    except FileError:
        return None
    return length_said(settings.get("model_max_length"))


VAE = "vae"
"""The folder of a pipeline's autoencoder."""


def folder_name(what: str, place: int) -> str:
    """``text_encoder`` or ``tokenizer`` at a place, as pipelines call their folders."""
    return what if place == 1 else f"{what}_{place}"


def is_text(field: str) -> bool:
    """Whether a backbone's field is made of its prompt."""
    return field.startswith(("context", "pooled"))


def text_fields(fields: Iterable[str]) -> frozenset[str]:
    """Those of ``fields`` that are made of a prompt."""
    return frozenset(filter(is_text, fields))
