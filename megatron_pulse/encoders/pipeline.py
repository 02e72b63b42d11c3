"""The frozen text encoders of a diffusers pipeline folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.encoders.pieces import Piece, run_pieces
from megatron_pulse.encoders.recipe import Kind, Part, State, TextRecipe, folder_name
from megatron_pulse.encoders.text import text_pieces
from megatron_pulse.faults import UserError, raised, told

_LONGEST = 1 << 14
"""Tokens; tokenizers that say no length say a much larger one."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")


class EncodersError(UserError):
    """A pipeline folder that cannot encode what is asked for."""


class TextEncoder:
    """One frozen encoder with its tokenizer, cut into ``pieces``.

    ``width`` is that of its states, ``pooled_width`` that of its pooled one.
    """

    def __init__(
        self,
        folder: Path,
        place: int,
        recipe: TextRecipe,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        import transformers

        self.kind, self.place, self.device = recipe.kinds[place], place, device
        where = folder / folder_name("text_encoder", place)
        tokens = folder / folder_name("tokenizer", place)
        kind = getattr(transformers, self.kind.value)
        chosen = dtype or (torch.float32 if device.type == "cpu" else "auto")
        model = kind.from_pretrained(str(where), local_files_only=True, dtype=chosen)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            str(tokens), local_files_only=True
        )
        self.model = model.to(device).eval().requires_grad_(False)
        self.dtype: torch.dtype = self.model.dtype
        self.width = int(getattr(model.config, "d_model", 0) or model.config.hidden_size)
        projected = self.kind is Kind.PROJECTED_CLIP
        self.pooled_width = int(model.config.projection_dim) if projected else self.width
        masked = place in recipe.masked or bool(getattr(model.config, "use_attention_mask", False))
        self.pieces: tuple[Piece, ...] = text_pieces(
            self.kind, self.model, recipe.states_of(place), masked
        )
        self.digest = digest_of(where)
        self.tokenizer_digest = digest_of(tokens)

    @property
    def own_length(self) -> int | None:
        """How many tokens its tokenizer pads to; None if that says nothing."""
        length = int(self.tokenizer.model_max_length)
        return length if length <= _LONGEST else None

    def tokenize(self, text: str, length: int) -> dict[str, Tensor]:
        """``ids`` and ``mask`` of one text, [1, length], cut and padded."""
        made = self.tokenizer(
            [text], padding="max_length", max_length=length, truncation=True, return_tensors="pt",
            return_attention_mask=True,
        )  # fmt: skip
        ids: Tensor = made["input_ids"]
        return {"ids": ids, "mask": made["attention_mask"]}

    def encode(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All states of tokenized texts, and their ``mask``."""
        given = {name: value.to(self.device) for name, value in tokens.items()}
        states: dict[str, Tensor] = run_pieces(self.pieces, given)
        return states

    def __str__(self) -> str:
        return (
            f"{self.kind.value} {str(self.dtype).removeprefix('torch.')} {self.digest}, "
            f"tokenizer {self.tokenizer_digest}"
        )


class TextEncoders:
    """Encodes prompts as the fields that a backbone reads, as diffusers' pipelines do.

    ``shapes`` are the fields' shapes in the backbone. One text is encoded at a time: the bits of
    an encoder's states depend on how many are encoded together (see the tests), and stored states
    must be those of encoding in the loop. ``dtype`` None is that of the folder, or fp32 on a CPU.
    Nothing is downloaded. Raises EncodersError with everything that the folder lacks.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: TextRecipe,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.folder, self.recipe = Path(folder), recipe
        self.shapes = {name: tuple(shapes[name]) for name in recipe.fields}
        self._require_folders()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoders: dict[int, TextEncoder] = {}
        faults = []
        for place in recipe.kinds:
            try:
                self.encoders[place] = TextEncoder(self.folder, place, recipe, dtype, device)
            except Exception as error:  # transformers raises many kinds
                faults.append(f"{folder_name('text_encoder', place)}: {raised(error)}")
        self._require(faults)
        self._lengths = self._fitted_lengths(faults)
        self._require(faults or self._misfits())
        self._zeros = recipe.zeros_if_empty and bool(
            _json(self.folder / "model_index.json").get("force_zeros_for_empty_prompt", True)
        )

    def __call__(self, text: str) -> dict[str, Tensor]:
        """Every field of one prompt, without a batch dimension: fp32 states and int64 masks."""
        text = text.lower().strip() if self.recipe.lower else text
        found = {}
        for place, encoder in self.encoders.items():
            tokens = encoder.tokenize(text, self._lengths[place])
            found[place] = {k: v[0].cpu() for k, v in encoder.encode(tokens).items() if v.ndim}
        return {name: self._joined(name, found) for name in self.recipe.fields}

    def null(self) -> dict[str, Tensor]:
        """What stands for no prompt."""
        fields = self("")
        if not self._zeros:
            return fields
        return {name: v if v.dtype == torch.int64 else v.zero_() for name, v in fields.items()}

    def made_by(self) -> dict[str, str]:
        """For every field, what makes it: states, classes, dtypes, lengths, digests of weights."""
        said = {}
        for name in self.recipe.fields:
            places = sorted({part.place for row in self.recipe.fields[name] for part in row})
            of = "; ".join(
                f"{folder_name('text_encoder', place)} {self.encoders[place]}, "
                f"{self._lengths[place]} tokens"
                + (" masked" if place in self.recipe.masked else "")
                for place in places
            )
            said[name] = f"{self.recipe.told(name)} ({of})"
        return said

    def _joined(self, name: str, found: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        rows = [
            torch.cat([found[part.place][part.state.value] for part in row], dim=-1)
            for row in self.recipe.fields[name]
        ]
        if rows[0].dtype == torch.int64:
            return rows[0]
        widest = max(row.shape[-1] for row in rows)
        padded = [torch.nn.functional.pad(row, (0, widest - row.shape[-1])) for row in rows]
        return (padded[0] if len(padded) == 1 else torch.cat(padded)).float()

    def _require(self, faults: list[str]) -> None:
        if faults:
            remedy = "Give the folder of the pipeline that the backbone is of."
            raise EncodersError(told(f"encoders {self.folder}", faults, remedy))

    def _require_folders(self) -> None:
        faults = []
        if not self.folder.is_dir():
            self._require(["there is no such folder"])
        for place, kind in self.recipe.kinds.items():
            where, tokens = (folder_name(what, place) for what in ("text_encoder", "tokenizer"))
            config = self.folder / where / "config.json"
            if not config.is_file():
                faults.append(f"{where}/config.json is missing: {kind.value} is needed there")
            elif kind.value not in (names := _json(config).get("architectures") or []):
                has = ", ".join(map(str, names)) or "no class that its config.json names"
                faults.append(f"{where} is {has}, and {kind.value} is needed there")
            if not (self.folder / tokens).is_dir():
                faults.append(f"{tokens} is missing")
        self._require(faults)

    def _fitted_lengths(self, faults: list[str]) -> dict[int, int]:
        """Tokens by place."""
        lengths: dict[int, int] = {}
        for place, encoder in self.encoders.items():
            if place in self.recipe.fitted:
                continue
            if (own := encoder.own_length) is None:
                faults.append(f"{folder_name('tokenizer', place)} has no model_max_length")
            lengths[place] = own or 1
        for name, rows in self.recipe.fields.items():
            if len(self.shapes[name]) != 2:
                continue
            (fitted,) = {p.place for row in rows for p in row} & self.recipe.fitted or {0}
            if fitted:
                others = sum(lengths[row[0].place] for row in rows if row[0].place != fitted)
                lengths[fitted] = self.shapes[name][0] - others
                if lengths[fitted] < 1:
                    faults.append(
                        f"{name} of {self.shapes[name][0]} tokens has none left for "
                        f"{folder_name('text_encoder', fitted)}: {others} are the others'"
                    )
        return lengths

    def _shape(self, part: Part) -> tuple[int, ...]:
        encoder, length = self.encoders[part.place], self._lengths[part.place]
        if part.state is State.POOLED:
            return (encoder.pooled_width,)
        return (length,) if part.state is State.MASK else (length, encoder.width)

    def _misfits(self) -> list[str]:
        faults = []
        for name, rows in self.recipe.fields.items():
            shapes = [[self._shape(part) for part in row] for row in rows]
            if len(shapes[0][0]) == 1:
                made: tuple[int, ...] = (sum(shape[0] for shape in shapes[0]),)
            else:
                lengths = [{shape[0] for shape in row} for row in shapes]
                if any(len(row) > 1 for row in lengths):
                    faults.append(f"the encoders of {name} have texts of different lengths")
                width = max(sum(shape[1] for shape in row) for row in shapes)
                made = (sum(max(row) for row in lengths), width)
            if made != self.shapes[name]:
                faults.append(
                    f"they make {name} {'x'.join(map(str, made))}, the backbone reads "
                    f"{'x'.join(map(str, self.shapes[name]))}"
                )
        return faults


def digest_of(folder: Path) -> str:
    """SHA-256 of a component's weights, config and vocabulary: names and contents of files."""
    whole = hashlib.sha256()
    for path in sorted({p for pattern in _WEIGHTS for p in folder.glob(pattern)}):
        with open(path, "rb") as file:
            whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{whole.hexdigest()[:16]}"


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
