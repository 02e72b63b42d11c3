"""Frozen text encoders of a diffusers pipeline folder."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.encoders.encoder_piece import EncoderPiece, run_pieces
from megatron_pulse.encoders.finite import CHECK, all_finite, not_finite
from megatron_pulse.encoders.loading import (
    files_amiss,
    load,
    require_all,
    require_layers,
    silently,
    stored,
)
from megatron_pulse.encoders.seen_pictures import SeenPictures
from megatron_pulse.encoders.text_pieces import Kept, text_pieces
from megatron_pulse.encoders.text_recipe import (
    CONNECTORS,
    ComponentKind,
    Part,
    State,
    TextParts,
    TextRecipe,
    folder_name,
)
from megatron_pulse.encoders.tokens import (
    Tokenizers,
    digest_of,
    ids_name,
    mask_name,
    misfits,
    missing_tokenizers,
    require,
)
from megatron_pulse.errors import UserError, collecting, describe_exception
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json


class TextEncoder:
    """One frozen text encoder, split into ``pieces``.

    ``width`` and ``pooled_width`` are the widths of its states and of its pooled state. Without
    ``weighs`` the weights are not loaded: the object cannot encode, but describes its outputs.
    """

    def __init__(
        self,
        folder: Path,
        place: int,
        recipe: TextRecipe,
        dtype: torch.dtype | None,
        device: torch.device,
        kept: Kept,
        weighs: bool = True,
    ) -> None:
        import transformers

        self.kind, self.place, self.device = recipe.kinds[place], place, device
        self.multiple = 1
        """Divisor of the number of tokens of a text."""
        self._sees = recipe.sees and weighs
        self.whole: Any = None
        """Model with its vision tower, if it also reads pictures."""
        where = folder / folder_name("text_encoder", place)
        kind = _class_of(self.kind)
        chosen = dtype or (torch.float32 if device.type == "cpu" else "auto")
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        config = kind.config_class.from_pretrained(str(where), local_files_only=True)
        tensors = stored(where, "transformers", weighs)
        with torch.device("meta"):
            require_layers(tensors, kind(config))
        if weighs and tensors is not None:
            # A device context records torch's constructors at its first use, while transformers
            # patches torch.linspace during loading. An earlier first use avoids recording the
            # patched function.
            with torch.device("cpu"):
                torch.empty(0)
            with silently(transformers.utils.logging):
                model, found = kind.from_pretrained(
                    None, config=config, state_dict=dict(tensors), dtype=chosen,
                    output_loading_info=True,
                )  # fmt: skip
            require_all(found["missing_keys"])
            model = self._trunk(model).to(device)
        else:
            with torch.device("meta"):
                model = self._trunk(kind(config)).to(dtype)
        self.model = model.eval().requires_grad_(False)
        self.dtype: torch.dtype = self.model.dtype
        self.width = int(getattr(model.config, "d_model", 0) or model.config.hidden_size)
        projected = self.kind is ComponentKind.PROJECTED_CLIP
        self.pooled_width = int(model.config.projection_dim) if projected else self.width
        said = recipe.masked_if_said and getattr(model.config, "use_attention_mask", False)
        masked = (place in recipe.masked or bool(said)) and weighs  # a mask depends on the ids
        self._folders = [where]
        connectors = None
        if recipe.connects:
            self._folders.append(folder / CONNECTORS)
            connectors = _connectors(folder / CONNECTORS, self.dtype, device, weighs)
            reads = connectors.config.text_proj_in_factor, connectors.config.caption_channels
            makes = len(self.model.layers) + 1, self.width
            if reads != makes:
                raise UserError(
                    "{}: they read {} states of width {}, the encoder makes {} of width {}".format(
                        CONNECTORS, *reads, *makes
                    )
                )
            self.width = connectors.video_connector.inner_dim
            self.multiple = connectors.video_connector.num_learnable_registers or 1
        self.pieces: tuple[EncoderPiece, ...] = text_pieces(
            self.kind, self.model, recipe.states_of(place), masked, kept, connectors
        )

    def _trunk(self, model: Any) -> Any:
        """Layers that read text: of a language model no head, no vision tower."""
        if self._sees:
            self.whole = model.eval().requires_grad_(False).to(self.device)
        if self.kind is ComponentKind.GLM:
            model.output_layer = torch.nn.Identity()  # the head, which no state needs
        return model.get_decoder() if self.kind.is_decoder else model

    @property
    def digest(self) -> str:
        """Digests of the files of the encoder and of its connectors."""
        return " ".join(map(digest_of, self._folders))

    def encode(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All states of tokenized texts, ``ids`` and ``mask`` [b, length], and their ``mask``."""
        given = {name: value.to(self.device) for name, value in tokens.items()}
        states: dict[str, Tensor] = run_pieces(self.pieces, given)
        return states

    @torch.no_grad()
    def see(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Last states ``[1, length, width]`` of a prompt and a picture (``SeenPictures``)."""
        given = {name: value.to(self.device) for name, value in inputs.items()}
        given["pixel_values"] = given["pixel_values"].to(self.dtype)
        made = self.whole(**given, output_hidden_states=True, logits_to_keep=1)
        last: Tensor = made.hidden_states[-1]
        return last

    def __str__(self) -> str:
        return f"{self.kind.value} {str(self.dtype).removeprefix('torch.')} {self.digest}"


def _class_of(kind: ComponentKind) -> Any:
    """Class of models of this kind."""
    if kind is ComponentKind.GLM:
        from diffusers.pipelines.kolors.text_encoder import ChatGLMModel

        return ChatGLMModel
    import transformers

    return getattr(transformers, kind.value)


def _connectors(folder: Path, dtype: torch.dtype, device: torch.device, weighs: bool) -> Any:
    """LTX-2's connectors of a folder, without those of sound."""
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    try:
        with torch.device("meta"), silently(diffusers.utils.logging):
            config = LTX2TextConnectors.load_config(str(folder), local_files_only=True)
            model: Any = LTX2TextConnectors.from_config(config)
        tensors = stored(folder, "diffusers", weighs)
        require_layers(tensors, model)
        model.audio_connector = _Silent()
        if model.config.per_modality_projections:
            model.audio_text_proj_in = torch.nn.Identity()
        torch.nn.Module.to(model, dtype)
        if weighs and tensors is not None:
            load(model, tensors, dtype)
            model = model.to(device)
    except Exception as error:  # diffusers raises many types
        told = str(error) if isinstance(error, UserError) else describe_exception(error)
        raise UserError(f"{CONNECTORS}: {told}") from error
    return model.eval().requires_grad_(False)


class _Silent(torch.nn.Module):
    """Stand-in for a connector whose result is dropped."""

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return states, mask


class TextEncoders:
    """Encoder of prompts to the fields that a backbone reads, as in diffusers' pipelines.

    ``shapes`` are the fields' shapes in the backbone. Texts are encoded one at a time: the bits
    depend on the batch size, and stored states must equal states encoded in the training loop.
    ``dtype`` None is the folder's, or fp32 on a CPU. Only encoders at ``places`` load their weights
    (None: all); encoding needs all of them. ``zeros_if_empty``: zeros replace the states of the
    empty text. Nothing is downloaded. Raises EncodersError with everything that the folder lacks.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: TextRecipe,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype | None = None,
        places: Collection[int] | None = None,
    ) -> None:
        self.folder, self.recipe = Path(folder), recipe
        self.shapes = {name: tuple(shapes[name]) for name in recipe.fields}
        require(self.folder, missing_tokenizers(self.folder, recipe) + self._missing_encoders())
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizers = Tokenizers(self.folder, recipe, self.shapes)
        self._pictures = SeenPictures(self.folder, self.tokenizers[1]) if recipe.sees else None
        self.encoders: dict[int, TextEncoder] = {}
        faults: list[str] = []
        self.zeros_if_empty = recipe.zeros_if_empty
        if recipe.zeros_if_empty:
            with collecting(faults):
                index = read_json(self.folder / "model_index.json", FileKind.PIPELINE)
                self.zeros_if_empty = bool(index.get("force_zeros_for_empty_prompt", True))
        for place in recipe.kinds:
            try:
                weighs = places is None or place in places
                kept = Kept(
                    self.tokenizers.crops[place], self.tokenizers.templates.get(place),
                    place in recipe.trimmed, place in recipe.absent,
                )  # fmt: skip
                encoder = TextEncoder(self.folder, place, recipe, dtype, device, kept, weighs)
                self.encoders[place] = encoder
            except UserError as error:
                faults.append(f"{folder_name('text_encoder', place)}: {error}")
            except Exception as error:  # transformers raises many types
                faults.append(f"{folder_name('text_encoder', place)}: {describe_exception(error)}")
        require(self.folder, faults)
        require(self.folder, [*self._misfits(), *self._unknown_tokens()], misfits(self.recipe))

    def __call__(
        self, text: str, negative: bool = False, picture: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Every field of one prompt, without a batch dimension: fp32 states and int64 masks.

        A ``negative`` prompt is one to be guided away from. An encoder that ``sees`` also reads the
        ``picture`` ``[3, h, w]`` in [-1, 1].
        """
        if self._pictures is not None:
            if picture is None:
                raise UserError(
                    f"encoders {self.folder}: the text encoder reads a picture beside the prompt, "
                    "and there is none. Write states ahead ('pulse data write-latents'), or give "
                    "'pulse sample --image FILE'"
                )
            return self._seen(self._pictures(text, picture))
        return self.encode(self.tokenizers(text, negative))

    def _seen(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every field of a prompt with a picture."""
        length, crop = self.tokenizers.state_lengths[1], self.tokenizers.crops[1]
        (states,) = self.encoders[1].see(inputs)[:, crop:].cpu()
        if not all_finite({str(State.LAST): states}):
            require(self.folder, [not_finite("text_encoder", self.encoders[1].dtype)], CHECK)
        if (missing := length - len(states)) < 0:
            option = self.recipe.length_option or "text length"
            raise UserError(
                f"a prompt and its picture have {len(states)} tokens, the backbone reads {length}: "
                f"give --option {option}={len(states)}, or more"
            )
        padding = torch.nn.functional.pad
        mask = padding(torch.ones(len(states), dtype=torch.int64), (0, missing))
        made = {State.LAST.value: padding(states, (0, 0, 0, missing)), State.MASK.value: mask}
        return self.joined({1: made})

    def encode(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every field of one tokenized prompt, ``[length]`` each, as made by ``Tokenizers``."""
        return self.joined(self._states(tokens))

    def _states(self, tokens: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """States of one tokenized prompt by place."""
        found = {}
        for place, encoder in self.encoders.items():
            given = {"ids": tokens[ids_name(place)][None], "mask": tokens[mask_name(place)][None]}
            found[place] = {k: v[0].cpu() for k, v in encoder.encode(given).items() if k[0] != "_"}
            if not all_finite(found[place]):
                name = folder_name("text_encoder", place)
                require(self.folder, [not_finite(name, encoder.dtype)], CHECK)
        return found

    def joined(self, found: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join states by place and name into fields; a batch dimension is kept.

        Fields that also need other places are omitted.
        """
        return {
            name: self._joined(name, found)
            for name, rows in self.recipe.fields.items()
            if all(part.place in found for row in rows for part in row)
        }

    def dropped(self, states: Mapping[str, Tensor], which: Tensor) -> dict[str, Tensor]:
        """Zero the ``states [b, ...]`` of dropped texts; ``which``, bool [b], marks them.

        Without ``zeros_if_empty`` the states stay: dropped texts were encoded as the empty text.
        """
        if not self.zeros_if_empty:
            return dict(states)
        return {
            name: value
            if value.dtype == torch.int64
            else value.masked_fill(
                which.view(-1, *[1] * (value.ndim - 1)).to(value.device, non_blocking=True), 0
            )
            for name, value in states.items()
        }

    def null(self) -> dict[str, Tensor]:
        """Fields of the empty prompt; none if each picture has its own."""
        if self.recipe.sees:
            return {}
        fields = {name: value[None] for name, value in self("", negative=True).items()}
        return {name: v[0] for name, v in self.dropped(fields, torch.tensor([True])).items()}

    @property
    def parts(self) -> TextParts:
        """Parts of the fields by encoder: (start, stop) in each dimension."""
        found: dict[str, dict[str, list[list[list[int]]]]] = {}
        for name, rows in self.recipe.fields.items():
            begin = 0
            for row in rows:
                sizes, at = [self._shape(part) for part in row], 0
                for part, size in zip(row, sizes, strict=True):
                    rest = [[begin, begin + size[0]]] if len(size) == 2 else []
                    of = found.setdefault(folder_name("text_encoder", part.place), {})
                    of.setdefault(name, []).append([*rest, [at, at + size[-1]]])
                    at += size[-1]
                begin += sizes[0][0]
        return found

    def excess(self, text: str) -> int:
        """Largest number of tokens truncated from a text; 0 if the text fits."""
        return self.tokenizers.excess(text)

    def made_by(self) -> dict[str, str]:
        """Provenance of every field: states, classes, dtypes, lengths, digests of weights."""
        said = {}
        for name in self.recipe.fields:
            places = sorted({part.place for row in self.recipe.fields[name] for part in row})
            of = "; ".join(
                f"{folder_name('text_encoder', place)} {self.encoders[place]}, tokenizer "
                f"{self.tokenizers.digests[place]}, {self.tokenizers.lengths[place]} tokens"
                + (" masked" if place in self.recipe.masked else "")
                + self.tokenizers.cleaning
                for place in places
            )
            said[name] = f"{self.recipe.told(name)} ({of})"
        return said

    def _joined(self, name: str, found: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        rows = [
            torch.cat([found[part.place][part.key] for part in row], dim=-1)
            for row in self.recipe.fields[name]
        ]
        if rows[0].dtype == torch.int64:
            return rows[0]
        widest = max(row.shape[-1] for row in rows)
        padded = [torch.nn.functional.pad(row, (0, widest - row.shape[-1])) for row in rows]
        return (padded[0] if len(padded) == 1 else torch.cat(padded, dim=-2)).float()

    def _missing_encoders(self) -> list[str]:
        faults = []
        if self.recipe.connects and self.folder.is_dir():
            joined = self.folder / CONNECTORS
            faults += [f"{CONNECTORS}: {fault}" for fault in files_amiss(joined)]
            if not (joined / "config.json").is_file():
                faults.append(
                    f"{CONNECTORS}/config.json is missing: expected LTX2TextConnectors there"
                )
        for place, kind in self.recipe.kinds.items():
            where = folder_name("text_encoder", place)
            faults += [f"{where}: {fault}" for fault in files_amiss(self.folder / where)]
            config = self.folder / where / "config.json"
            if not config.is_file():
                if self.folder.is_dir():
                    faults.append(f"{where}/config.json is missing: expected {kind.value} there")
                continue
            with collecting(faults):
                names = read_json(config, FileKind.MODEL).get("architectures") or []
                if not {*kind.architectures} & {*names}:
                    has = ", ".join(map(str, names)) or "no class (its config.json names none)"
                    faults.append(f"{where} is {has}, but {kind.value} is expected there")
        return faults

    def _unknown_tokens(self) -> list[str]:
        """Faults of tokenizers whose ids exceed their encoder's vocabulary."""
        faults = []
        for place, encoder in self.encoders.items():
            known, made = int(encoder.model.config.vocab_size), self.tokenizers.num_tokens(place)
            if made > known:
                tokenizer = folder_name("tokenizer", place)
                faults.append(
                    f"{tokenizer} has {made} tokens, but {folder_name('text_encoder', place)} has "
                    f"{known}"
                )
        return faults

    def _shape(self, part: Part) -> tuple[int, ...]:
        encoder, length = self.encoders[part.place], self.tokenizers.state_lengths[part.place]
        if part.state is State.POOLED:
            return (encoder.pooled_width,)
        is_mask = part.state in (State.MASK, State.CONNECTED_MASK)
        return (length,) if is_mask else (length, encoder.width)

    def _misfits(self) -> list[str]:
        faults = [
            f"{CONNECTORS} take multiples of {encoder.multiple} tokens, the backbone reads {length}"
            for place, encoder in self.encoders.items()
            if (length := self.tokenizers.state_lengths[place]) % encoder.multiple
        ]
        for name, rows in self.recipe.fields.items():
            shapes = [[self._shape(part) for part in row] for row in rows]
            if len(shapes[0][0]) == 1:
                made: tuple[int, ...] = (sum(shape[0] for shape in shapes[0]),)
            else:
                lengths = [{shape[0] for shape in row} for row in shapes]
                if any(len(row) > 1 for row in lengths):
                    faults.append(f"the encoders of {name} use different text lengths")
                width = max(sum(shape[1] for shape in row) for row in shapes)
                made = (sum(max(row) for row in lengths), width)
            if made != self.shapes[name]:
                faults.append(
                    f"they make {name} {'x'.join(map(str, made))}, but the backbone reads "
                    f"{'x'.join(map(str, self.shapes[name]))}"
                )
        return faults
