"""Vision encoder of a diffusers pipeline folder, which sees the first frame of a clip."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from megatron_pulse.backbone.appended_fields import CLIP_STATES, IMAGE_EMBEDDING, SIGLIP_STATES
from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.encoders.finite import CHECK, all_finite, not_finite
from megatron_pulse.encoders.image_pieces import PIXELS
from megatron_pulse.encoders.loading import files_amiss, require_all, silently
from megatron_pulse.encoders.tokens import digest_of, require
from megatron_pulse.errors import UserError, describe_exception
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json

IMAGE_ENCODER = "image_encoder"
EMBEDDING = "embedding"
"""State of the picture, ``[1, 1, width]``, or ``[1, tokens, width]``."""


@dataclass(frozen=True)
class Reading:
    """Classes of a vision encoder, and the folder and class of its processor of pictures."""

    kinds: tuple[str, ...]
    processor: str
    folder: str = "feature_extractor"


_READINGS = {
    IMAGE_EMBEDDING: Reading(("CLIPVisionModelWithProjection",), "CLIPImageProcessor"),
    CLIP_STATES: Reading(
        ("CLIPVisionModel", "CLIPVisionModelWithProjection"), "CLIPImageProcessor",
        "image_processor",
    ),
    SIGLIP_STATES: Reading(("SiglipVisionModel",), "SiglipImageProcessor"),
}  # fmt: skip


class ImageEncoder:
    """Vision encoder that makes the ``field`` of a first frame, of this ``shape``.

    Of SVD that is a vector, of Wan 2.1 and HunyuanVideo 1.5 the states of all tokens. Pictures are
    resized and normalised as in diffusers' pipelines. ``dtype`` None is fp32 on a CPU, and the
    folder's elsewhere. Nothing is downloaded. Raises EncodersError with what the pipeline
    ``folder`` lacks.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        field: str = IMAGE_EMBEDDING,
    ) -> None:
        import transformers

        self.field, reading = field, _READINGS[field]
        where, processor = Path(folder) / IMAGE_ENCODER, Path(folder) / reading.folder
        needed = (where / "config.json", processor / "preprocessor_config.json")
        faults = [
            f"{path.parent.name}/{path.name} is missing: expected {kind} there"
            for path, kind in zip(needed, (reading.kinds[0], reading.processor), strict=True)
            if not path.is_file()
        ]
        faults += [f"{IMAGE_ENCODER}: {fault}" for fault in files_amiss(where)]
        require(Path(folder), faults)
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kept: Any = torch.float32 if self.device.type == "cpu" else "auto"
        try:
            named = read_json(where / "config.json", FileKind.MODEL).get("architectures") or []
            self._kind = next((kind for kind in reading.kinds if kind in named), "")
            if not self._kind:
                raise UserError(f"its config.json describes {named}, not {reading.kinds[0]}")
            with silently(transformers.utils.logging):
                model, found = getattr(transformers, self._kind).from_pretrained(
                    str(where), dtype=dtype or kept, local_files_only=True,
                    output_loading_info=True,
                )  # fmt: skip
                kind = getattr(transformers, reading.processor)
                self._processor: Any = kind.from_pretrained(str(processor))
            require_all(found["missing_keys"])
        except Exception as error:  # transformers raises many types
            told = str(error) if isinstance(error, UserError) else describe_exception(error)
            require(Path(folder), [f"{IMAGE_ENCODER}: {told}"])
            raise
        self._model: Any = model.to(self.device).eval().requires_grad_(False)
        self._folder = where
        config = model.config
        num_tokens = (config.image_size // config.patch_size) ** 2 + (field == CLIP_STATES)
        self.shape = (num_tokens, int(config.hidden_size))
        if field == IMAGE_EMBEDDING:
            self.shape = (1, int(config.projection_dim))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        kind: torch.dtype = self._model.dtype
        return kind

    @property
    def pieces(self) -> tuple[EncoderPiece, ...]:
        """The encoder as one layer, of ``pixels`` [1, 3, h, w] on any device."""

        def embed(states: States) -> States:
            if self.field == IMAGE_EMBEDDING:
                found = self._model(self._resized(states[PIXELS])).image_embeds
                return {EMBEDDING: found.float()[None]}
            made = self._model(self._processed(states[PIXELS]), output_hidden_states=True)
            last: Tensor = made.last_hidden_state
            return {
                EMBEDDING: (made.hidden_states[-2] if self.field == CLIP_STATES else last).float()
            }

        return (EncoderPiece(IMAGE_ENCODER, embed, (self._model,)),)

    @torch.no_grad()
    def __call__(self, picture: Tensor) -> Tensor:
        """Field fp32 of a picture ``[3, h, w]`` in [-1, 1]."""
        (found,) = run_pieces(self.pieces, {PIXELS: picture[None]})[EMBEDDING]
        if not all_finite({IMAGE_ENCODER: found}):
            require(self._folder.parent, [not_finite(IMAGE_ENCODER, self.dtype)], CHECK)
        return found.cpu()

    def _processed(self, pictures: Tensor) -> Tensor:
        """Input of the model, of pictures as files hold them."""
        stored = ((pictures.float().cpu() + 1) * 127.5).round().to(torch.uint8)
        files = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in stored]
        pixels = self._processor(images=files, return_tensors="pt").pixel_values
        on_device: Tensor = pixels.to(self.device, self.dtype)
        return on_device

    def _resized(self, pictures: Tensor) -> Tensor:
        """Input of the model, resized on the host: the bits are those of every device."""
        # Private, but the resizing of the pipeline, which no public function of diffusers has.
        from diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion import (
            _resize_with_antialiasing,
        )

        side = self._model.config.image_size
        resized = (_resize_with_antialiasing(pictures.float().cpu(), (side, side)) + 1) / 2
        as_it_is = dict.fromkeys(("do_center_crop", "do_resize", "do_rescale"), False)
        pixels = self._processor(
            images=resized, do_normalize=True, return_tensors="pt", **as_it_is
        ).pixel_values
        on_device: Tensor = pixels.to(self.device, self.dtype)
        return on_device

    def made_by(self) -> str:
        """Provenance of the embeddings: class, dtype, digest of the weights."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self._kind} {dtype} {digest_of(self._folder)}"
