"""Cleaning and tokenization of texts as in diffusers' pipelines.

Tokenizers are loaded from a pipeline folder without the encoders, so data workers need no encoder
weights.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.diffusion.published import original_files
from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.loading import files_amiss
from megatron_pulse.encoders.templates import Rendering, rendering
from megatron_pulse.encoders.text_recipe import (
    LONGEST,
    VAE,
    Cleaning,
    ComponentKind,
    TextParts,
    TextRecipe,
    folder_name,
    length_said,
)
from megatron_pulse.errors import UserError, collecting, describe_exception, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json

_ZEROS_IF_EMPTY = "force_zeros_for_empty_prompt"
_CONTENT = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")


class EncodersError(UserError):
    """Error for a pipeline folder that cannot encode the requested fields."""


_WHOLE = "Give the complete pipeline folder of the backbone."


def misfits(recipe: TextRecipe) -> str:
    """Advice for encoders that make other fields than the backbone's."""
    option = recipe.length_option
    length = f"an option of the backbone ({option}=N)" if option else "no option of this backbone"
    return f"Give the pipeline folder of the backbone; its text length is {length}."


def require(folder: Path, faults: Sequence[str], remedy: str = _WHOLE) -> None:
    """Raise EncodersError if there are faults of the pipeline's folder."""
    if faults:
        raise EncodersError(format_faults(f"encoders {folder}", faults, remedy))


def ids_name(place: int) -> str:
    """Name in a sample of the ids for the encoder at a place: ``text_encoder_2_ids``."""
    return f"{folder_name('text_encoder', place)}_ids"


def mask_name(place: int) -> str:
    """Name in a sample of the mask of these ids: ``text_encoder_2_mask``."""
    return f"{folder_name('text_encoder', place)}_mask"


class Tokenizers:
    """Tokenizers of a recipe's encoders: token ids and masks of a text.

    ``lengths`` are the numbers of tokens by place, for fields of the given ``shapes`` in the
    backbone, with those that a template drops. ``digests`` are those of the tokenizers' files.
    Nothing is downloaded. Raises EncodersError with everything that the folder lacks.
    """

    def __init__(
        self, folder: str | Path, recipe: TextRecipe, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self.folder, self.recipe = Path(folder), recipe
        require(self.folder, missing_tokenizers(self.folder, recipe))
        self._tokenizers: dict[int, Any] = {}
        self._renderings: dict[int, Rendering] = {}
        self.crops = dict.fromkeys(recipe.kinds, 0)
        """Number of tokens, by place, whose states are dropped."""
        self.templates: dict[int, Tensor] = {}
        """Ids of these, where they follow the first token of a prompt."""
        self.digests: dict[int, str] = {}
        faults = []
        for place in recipe.kinds:
            where = self.folder / folder_name("tokenizer", place)
            try:
                # By default a terminal prompt would ask to run the folder's code.
                tokenizer = _tokenizer_class(recipe.kinds[place]).from_pretrained(
                    str(where), local_files_only=True, trust_remote_code=False
                )
                faults += _no_vocabulary(where, tokenizer)
                if tokenizer.pad_token is None:
                    faults.append(
                        f"{where.name} has no pad_token, which fills texts to equal length"
                    )
                for side, of in {"right": recipe.right_padded, "left": recipe.left_padded}.items():
                    if place in of:
                        tokenizer.padding_side = side
                self._tokenizers[place] = tokenizer
                if (template := recipe.templates.get(place)) is not None:
                    made = self._renderings[place] = rendering(template.pipeline, tokenizer)
                    # A missing chat template fails here.
                    alone = tokenizer(made.text(""), verbose=False)["input_ids"]
                    self.crops[place] = len(alone) - 2 if template.crop is None else template.crop
                    if template.crop is None:
                        self.templates[place] = torch.tensor(alone[1:-1])
            except Exception as error:  # transformers raises many types
                faults.append(f"{where.name}: {describe_exception(error)}")
            self.digests[place] = digest_of(where)
        require(self.folder, faults)
        self.lengths = self._fitted_lengths(shapes, faults)
        self._no_tokens_if_empty = False
        if recipe.no_tokens_if_empty:
            with collecting(faults):
                index = read_json(self.folder / PIPELINE_INDEX, FileKind.PIPELINE)
                self._no_tokens_if_empty = bool(index.get(_ZEROS_IF_EMPTY, False))
        require(self.folder, faults)

    def __getitem__(self, place: int) -> Any:
        """Tokenizer at a place."""
        return self._tokenizers[place]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all fields of a text; all are int64."""
        return {
            name: (length,)
            for place, length in self.lengths.items()
            for name in (ids_name(place), mask_name(place))
        }

    @property
    def parts(self) -> TextParts:
        """Parts of the fields by encoder: all of its ids and mask."""
        return {
            folder_name("text_encoder", place): {
                name: [((0, length),)] for name in (ids_name(place), mask_name(place))
            }
            for place, length in self.lengths.items()
        }

    def __call__(self, text: str, negative: bool = False) -> dict[str, Tensor]:
        """``text_encoder_ids``, ``text_encoder_mask`` ... of one text, truncated and
        padded, int64.

        A ``negative`` text is one to be guided away from.
        """
        found = {}
        for place in self._tokenizers:
            bare = negative and place in self.templates
            length = (self.state_lengths if bare else self.lengths)[place]
            made = self._tokens(
                text, place, negative, padding="max_length", max_length=length, truncation=True,
                return_attention_mask=True,
            )  # fmt: skip
            ids, mask = torch.tensor(made["input_ids"]), torch.tensor(made["attention_mask"])
            if more := self.lengths[place] - len(ids):
                ids = F.pad(ids, (0, more), value=self._tokenizers[place].pad_token_id)
                mask = F.pad(mask, (0, more))
            found[ids_name(place)] = ids
            is_absent = place in self.recipe.absent and not self._renderings[place].text(text)
            found[mask_name(place)] = torch.zeros_like(mask) if is_absent else mask
        if not text and self._no_tokens_if_empty:
            return {name: torch.zeros_like(value) for name, value in found.items()}
        return found

    @property
    def state_lengths(self) -> dict[int, int]:
        """Numbers of tokens whose states are kept, by place."""
        return {place: length - self.crops[place] for place, length in self.lengths.items()}

    def num_tokens(self, place: int) -> int:
        """Size of a tokenizer's vocabulary, an upper bound of its ids."""
        tokenizer = self._tokenizers[place]
        numbers: list[int] = list(tokenizer.get_vocab().values())
        return max(len(tokenizer), max(numbers, default=0) + 1)

    @property
    def known(self) -> dict[str, int]:
        """``num_tokens`` by the names of ids."""
        return {ids_name(place): self.num_tokens(place) for place in self.lengths}

    def excess(self, text: str) -> int:
        """Largest number of tokens truncated from a text at any place; 0 if the text fits."""
        return max(
            max(0, len(self._tokens(text, place, verbose=False)["input_ids"]) - length)
            for place, length in self.lengths.items()
        )

    @property
    def cleaning(self) -> str:
        """Name of the text cleaning, which depends on installed packages; empty without
        cleaning."""
        kind = self.recipe.cleaning
        return f", cleaned {kind}" if kind is not None and cleans(kind) else ""

    def _tokens(self, text: str, place: int, negative: bool = False, **settings: Any) -> Any:
        """Tokens of a text that is prepared as in the pipelines."""
        template, made = self.recipe.templates.get(place), Rendering(str)
        if template is not None and (template.on_negative or not negative):
            made = self._renderings[place]
        given = made.text(self._prepared(text, place))
        return self._tokenizers[place](given, add_special_tokens=made.special, **settings)

    def _prepared(self, text: str, place: int) -> str:
        """Text before it is put into a template."""
        if self.recipe.cleaning is not None:
            text = cleaned(text, self.recipe.cleaning)
        return with_all_vectors(text, self._tokenizers[place]) if self.recipe.inversions else text

    def null(self) -> dict[str, Tensor]:
        """Fields of the empty text, which replace a dropped caption."""
        return self("", negative=True)

    def made_by(self) -> dict[str, str]:
        """Provenance of every field."""
        return {
            name: f"{folder_name('tokenizer', place)} {self.digests[place]}, {length} tokens"
            + self.cleaning
            for place, length in self.lengths.items()
            for name in (ids_name(place), mask_name(place))
        }

    def _own_length(self, place: int) -> int | None:
        """Number of tokens that a tokenizer pads to; None if not given or implausible."""
        return length_said(self._tokenizers[place].model_max_length)

    def _fitted_lengths(
        self, shapes: Mapping[str, Sequence[int]], faults: list[str]
    ) -> dict[int, int]:
        lengths: dict[int, int] = {}
        for place in self.recipe.kinds:
            if place in self.recipe.fitted:
                continue
            if (own := self._own_length(self.recipe.padded_as.get(place, place))) is None:
                name = folder_name("tokenizer", place)
                faults.append(f"{name} has no model_max_length from 1 to {LONGEST}")
            lengths[place] = own or 1
        for name, rows in self.recipe.fields.items():
            if len(shapes[name]) != 2:
                continue
            (fitted,) = {p.place for row in rows for p in row} & self.recipe.fitted or {0}
            if fitted:
                others = sum(lengths[row[0].place] for row in rows if row[0].place != fitted)
                lengths[fitted] = shapes[name][0] - others + self.crops[fitted]
                if shapes[name][0] <= others:
                    faults.append(
                        f"{name} of {shapes[name][0]} tokens leaves none for "
                        f"{folder_name('text_encoder', fitted)}: other encoders use {others}"
                    )
        return dict(sorted(lengths.items()))


def _tokenizer_class(kind: ComponentKind) -> Any:
    """Class whose ``from_pretrained`` opens the tokenizer of an encoder."""
    if kind is ComponentKind.GLM:
        from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

        return ChatGLMTokenizer
    import transformers

    return transformers.AutoTokenizer


def _no_vocabulary(folder: Path, tokenizer: Any) -> list[str]:
    """Faults of a folder without a vocabulary, for which transformers makes an empty tokenizer.

    Either one file holds the vocabulary, or all files of the slow tokenizer are needed.
    """
    names = dict(getattr(tokenizer, "vocab_files_names", {}))
    whole = names.pop("tokenizer_file", "tokenizer.json")
    missing = [name for name in names.values() if not (folder / name).is_file()]
    if (folder / whole).is_file() or not missing:
        return []
    return [f"{folder.name} has no vocabulary: neither {whole} nor {' and '.join(missing)} exists"]


def missing_tokenizers(folder: Path, recipe: TextRecipe) -> list[str]:
    """Faults of missing tokenizers and of their unreadable files, or one for a missing folder."""
    if not folder.is_dir():
        return files_amiss(folder) if folder.is_file() else ["there is no such folder"]
    names = [folder_name("tokenizer", place) for place in recipe.kinds]
    faults = [f"{name} is missing" for name in names if not (folder / name).is_dir()]
    if len(faults) == len(names):
        faults += original_files(folder)
    return faults + [f"{name}: {fault}" for name in names for fault in files_amiss(folder / name)]


def recorded_by(arguments: argparse.Namespace) -> Mapping[str, str]:
    """File digests of a saved run's encoders and tokenizers; empty if not recorded."""
    return getattr(arguments, "pulse_encoded_by", None) or {}


def changed_since(folder: Path, encoded_by: Mapping[str, str]) -> list[str]:
    """Faults of encoders and tokenizers whose files differ from those of a trained run.

    ``encoded_by`` are the recorded digests by folder name.
    """
    return [
        f"{name} is {now}, but the model was trained with {was}"
        for name, was in sorted(encoded_by.items())
        if name != VAE and (now := digest_of(folder / name)) != was
    ]


def digest_of(folder: Path) -> str:
    """SHA-256 of a component's weights, config and vocabulary: names and contents of files."""
    whole = hashlib.sha256()
    for path in sorted({p for pattern in _CONTENT for p in folder.glob(pattern)}):
        with open(path, "rb") as file:
            whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{whole.hexdigest()[:16]}"


def cleaned(text: str, kind: Cleaning) -> str:
    """Clean a prompt as diffusers' pipelines do.

    If ``cleans`` is false, a caption is only lowercased and stripped.
    """
    if kind is Cleaning.PROMPT:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return str(prompt_clean(text))
    if kind is Cleaning.SPACES:
        return text.strip()
    if kind is Cleaning.LOWER_CASE:
        return text.lower().strip()
    return text.lower().strip() if (clean := _cleaner()) is None else clean(clean(text))


def cleans(kind: Cleaning) -> bool:
    """True if diffusers' packages for cleaning texts are installed (ftfy, for captions bs4 too)."""
    from diffusers.utils import is_ftfy_available

    if kind is Cleaning.CAPTION:
        return _cleaner() is not None
    return kind in (Cleaning.LOWER_CASE, Cleaning.SPACES) or bool(is_ftfy_available())


@functools.cache
def _cleaner() -> Callable[[str], str] | None:
    from diffusers.utils import is_bs4_available, is_ftfy_available

    if not (is_bs4_available() and is_ftfy_available()):
        return None
    from diffusers import PixArtAlphaPipeline

    pipeline: Any = object.__new__(PixArtAlphaPipeline)  # the method needs no component
    clean: Callable[[str], str] = pipeline._clean_caption
    return clean


def with_all_vectors(text: str, tokenizer: Any) -> str:
    """Expand tokens of textual inversion to all their vectors (``<cat>`` to ``<cat> <cat>_1 ...``).

    ``load_textual_inversion`` of diffusers trains them in this form.
    """
    added = tokenizer.added_tokens_encoder
    if not any(f"{token}_1" in added for token in added):
        return text
    for token in dict.fromkeys(tokenizer.tokenize(text)):
        if token not in added:
            continue
        tokens = [token]
        while (more := f"{token}_{len(tokens)}") in added:
            tokens.append(more)
        text = text.replace(token, " ".join(tokens))
    return text
