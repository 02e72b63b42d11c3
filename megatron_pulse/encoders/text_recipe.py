"""Recipes from prompts to backbone fields: the encoders, and their states. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_pulse.backbone.chain import TensorSpec
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json


class ComponentKind(StrEnum):
    """Class of the encoder at a place of a pipeline, in transformers (``GLM``: in diffusers)."""

    CLIP = "CLIPTextModel"
    PROJECTED_CLIP = "CLIPTextModelWithProjection"
    T5 = "T5EncoderModel"
    UMT5 = "UMT5EncoderModel"
    BERT = "BertModel"
    LLAMA = "LlamaModel"
    GEMMA2 = "Gemma2Model"
    GEMMA3 = "Gemma3ForConditionalGeneration"
    GLM = "ChatGLMModel"
    QWEN3 = "Qwen3Model"
    QWEN_VL = "Qwen2_5_VLForConditionalGeneration"
    QWEN_VL_TEXT = "Qwen2_5_VLTextModel"
    MISTRAL = "Mistral3ForConditionalGeneration"

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes in ``config.json`` whose weights it takes: its own, or one with a head."""
        if self in _DECODERS and self.value.endswith("Model"):
            return self.value, f"{self.value.removesuffix('Model')}ForCausalLM"
        return (self.value,)

    @property
    def is_decoder(self) -> bool:
        """True for causal language models."""
        return self in _DECODERS


_DECODERS = frozenset(
    {
        ComponentKind.LLAMA,
        ComponentKind.GEMMA2,
        ComponentKind.GEMMA3,
        ComponentKind.QWEN3,
        ComponentKind.QWEN_VL,
        ComponentKind.QWEN_VL_TEXT,
        ComponentKind.MISTRAL,
    }
)


class Cleaning(StrEnum):
    """Cleaning of texts before tokenization; both depend on installed packages."""

    CAPTION = "captions"
    """PixArt's: without addresses, tags and file names."""
    PROMPT = "prompts"
    """Wan's: repaired characters, single spaces."""
    LOWER_CASE = "case"
    """Sana's: lower case, without spaces around."""
    SPACES = "spaces"
    """LTX-2's: without spaces around."""


class State(StrEnum):
    """State taken from an encoder."""

    LAST = "last"
    """States after the last layer and the final norm, ``[length, width]``."""
    PENULTIMATE = "penultimate"
    """States before the last layer, without a norm, ``[length, width]``."""
    HIDDEN = "hidden"
    """States after a number of layers, without a norm, ``[length, width]``."""
    POOLED = "pooled"
    """Last state of the end token, after the projection if there is one: ``[width]``."""
    CONNECTED = "connected"
    """States of all layers, joined by the pipeline's connectors, ``[length, width]``."""
    CONNECTED_MASK = "connected_mask"
    """The connectors' own mask: ``[length]``."""
    MASK = "mask"
    """1 at the text's tokens, 0 at padding: ``[length]``."""


@dataclass(frozen=True)
class Part:
    """State of the encoder at a place (1: ``text_encoder``, 2: ``text_encoder_2`` ...).

    ``layer`` is that of ``State.HIDDEN``, an index into transformers' ``hidden_states``.
    """

    place: int
    state: State
    layer: int | None = None

    @property
    def key(self) -> str:
        """Name of the state among those of its encoder: ``last``, ``hidden_-3``."""
        return str(self.state) if self.layer is None else f"{self.state}_{self.layer}"

    def __str__(self) -> str:
        return f"{folder_name('text_encoder', self.place)} {self.key}"


@dataclass(frozen=True)
class PromptTemplate:
    """Text around a prompt, as the ``pipeline`` of diffusers puts it (see ``templates.py``).

    The states of ``crop`` tokens of the template are dropped, the first ones, or all but one of a
    template that is before the prompt (None). ``on_negative``: negative and empty prompts have the
    template too.
    """

    pipeline: str
    crop: int | None = 0
    on_negative: bool = True


type TextParts = Mapping[str, Mapping[str, Sequence[Sequence[Sequence[int]]]]]
"""Parts of fields by text encoder: of its folder's name and a field's name, parts as (start, stop)
in every dimension.
"""

Row = tuple[Part, ...]
"""States concatenated along their width."""


@dataclass(frozen=True)
class TextRecipe:
    """Recipe of a backbone's text ``fields`` from the encoders at its places.

    A field is rows of states. Rows are padded with zeros to the widest, then concatenated along the
    sequence. ``kinds`` are the encoder classes by place.

    - Masks: places in ``masked`` attend only to the text's own tokens. With ``masked_if_said``, so
      do places whose config.json sets ``use_attention_mask``.
    - Padding: places in ``fitted`` are padded to the rest of the field's length, those in
      ``padded_as`` as another place, the others to their tokenizer's length.
    - Sides: padding is on the right at places in ``right_padded``, on the left at places in
      ``left_padded``, else where the tokenizer says.
    - Zeros: states of padding at places in ``trimmed``. A text that leaves a place in ``absent``
      nothing to read has states and a mask of zeros there.
    - Templates: texts of places in ``templates`` are put into a template.
    - ``zeros_if_empty``: without a prompt the states are zeros if the pipeline's
      ``force_zeros_for_empty_prompt`` is true (its default), otherwise the encoding of "". With
      ``no_tokens_if_empty`` it has token ids and a mask of zeros if the setting is true.
    - ``cleaning``: texts are cleaned.
    - ``sees``: the encoder also reads the reference picture, whose tokens count.
    - ``beside``, ``never_beside``: other fields that a backbone with these text fields has, or
      has not.
    - ``inversions``: a token of textual inversion stands for all its vectors.
    - ``one_width``: all fields have the width of the one encoder.
    - ``length_option``: the backbone's option for the text length; empty if there is none.
    """

    fields: Mapping[str, tuple[Row, ...]]
    kinds: Mapping[int, ComponentKind]
    masked: frozenset[int] = frozenset()
    fitted: frozenset[int] = frozenset()
    padded_as: Mapping[int, int] = field(default_factory=dict)
    masked_if_said: bool = False
    right_padded: frozenset[int] = frozenset()
    left_padded: frozenset[int] = frozenset()
    trimmed: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    templates: Mapping[int, PromptTemplate] = field(default_factory=dict)
    zeros_if_empty: bool = False
    no_tokens_if_empty: bool = False
    cleaning: Cleaning | None = None
    beside: frozenset[str] = frozenset()
    never_beside: frozenset[str] = frozenset()
    inversions: bool = False
    sees: bool = False
    one_width: bool = False
    length_option: str = field(default="", compare=False)

    def is_of(self, batch_fields: Mapping[str, TensorSpec]) -> bool:
        """True if it makes the text that a backbone with these fields reads."""
        fields = batch_fields.keys()
        is_kin = self.beside <= fields and not self.never_beside & fields
        if not is_kin or self.fields.keys() != text_fields(fields):
            return False
        return not self.one_width or len({batch_fields[n].shape[-1] for n in self.fields}) == 1

    def parts(self) -> Iterator[Part]:
        """All parts of all fields."""
        for rows in self.fields.values():
            for row in rows:
                yield from row

    @property
    def connects(self) -> bool:
        """True if the pipeline's connectors join the states of its encoder's layers."""
        return any(part.state is State.CONNECTED for part in self.parts())

    def states_of(self, place: int) -> frozenset[str]:
        """Keys of the states taken from the encoder at a place."""
        return frozenset(part.key for part in self.parts() if part.place == place)

    def of(self, field: str, place: int) -> str:
        """States of the encoder at a place in a field, as text; empty if there are none."""
        found = [part.key for row in self.fields[field] for part in row if part.place == place]
        return " and ".join(dict.fromkeys(found))

    def told(self, field: str) -> str:
        """Composition of a field, as text."""
        return ", then ".join(" + ".join(map(str, row)) for row in self.fields[field])


LONGEST = 1 << 14
"""Largest plausible number of tokens; tokenizers without a limit report a far larger number."""


def length_said(number: object) -> int | None:
    """``model_max_length`` as a number of tokens, or None if the value is no such number."""
    return int(number) if isinstance(number, int | float) and 1 <= number <= LONGEST else None


def padded_length(tokenizer: Path) -> int | None:
    """Number of tokens that a folder's tokenizer pads to; None if its settings give none."""
    try:
        settings = read_json(tokenizer / "tokenizer_config.json", FileKind.MODEL)
    except FileError:
        return None
    return length_said(settings.get("model_max_length"))


CONNECTORS = "connectors"
"""Folder name of the module that joins the states of LTX-2's encoder."""
VAE = "vae"
"""Folder name of a pipeline's autoencoder."""


def folder_name(what: str, place: int) -> str:
    """Pipeline folder name of ``text_encoder`` or ``tokenizer`` at a place."""
    return what if place == 1 else f"{what}_{place}"


def place_of(text_encoder: str) -> int:
    """Place of an encoder by its folder name (see ``folder_name``)."""
    return int(text_encoder.removeprefix("text_encoder").removeprefix("_") or 1)


def dropped_name(text_encoder: str) -> str:
    """Name in a microbatch of the flags of samples whose text one encoder does not see."""
    return f"{text_encoder}_dropped"


def is_text(field: str) -> bool:
    """True if the named field of a backbone is made from the prompt."""
    return field.startswith(("context", "pooled"))


def text_fields(fields: Iterable[str]) -> frozenset[str]:
    """Subset of ``fields`` that is made from a prompt."""
    return frozenset(filter(is_text, fields))
