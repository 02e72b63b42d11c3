"""Vision encoder of a diffusers pipeline folder, as SVD embeds its first frame."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.encoders.finite import CHECK, all_finite, not_finite
from megatron_pulse.encoders.image_pieces import PIXELS
from megatron_pulse.encoders.loading import files_amiss, require_all, silently
from megatron_pulse.encoders.tokens import digest_of, require
from megatron_pulse.errors import UserError, describe_exception

IMAGE_ENCODER = "image_encoder"
EMBEDDING = "embedding"
"""State of the picture, ``[1, 1, width]``."""
_PROCESSOR = "feature_extractor"
_KIND = "CLIPVisionModelWithProjection"


class ImageEncoder:
    """CLIP's vision encoder with its projection: a picture becomes a vector of ``width``.

    Pictures are resized and normalised as in diffusers' StableVideoDiffusionPipeline. ``dtype``
    None is fp32 on a CPU, and the folder's elsewhere. Nothing is downloaded. Raises EncodersError
    with what the pipeline ``folder`` lacks.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        import transformers

        where, processor = Path(folder) / IMAGE_ENCODER, Path(folder) / _PROCESSOR
        needed = (where / "config.json", processor / "preprocessor_config.json")
        faults = [
            f"{path.parent.name}/{path.name} is missing: expected {kind} there"
            for path, kind in zip(needed, (_KIND, "CLIPImageProcessor"), strict=True)
            if not path.is_file()
        ]
        faults += [f"{IMAGE_ENCODER}: {fault}" for fault in files_amiss(where)]
        require(Path(folder), faults)
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kept: Any = torch.float32 if self.device.type == "cpu" else "auto"
        try:
            config = transformers.CLIPVisionConfig.from_pretrained(str(where))
            if _KIND not in (config.architectures or ()):
                raise UserError(f"its config.json describes {config.architectures}, not {_KIND}")
            with silently(transformers.utils.logging):
                model, found = getattr(transformers, _KIND).from_pretrained(
                    str(where), dtype=dtype or kept, local_files_only=True,
                    output_loading_info=True,
                )  # fmt: skip
                kind = transformers.CLIPImageProcessor
                self._processor: Any = kind.from_pretrained(str(processor))
            require_all(found["missing_keys"])
        except Exception as error:  # transformers raises many types
            told = str(error) if isinstance(error, UserError) else describe_exception(error)
            require(Path(folder), [f"{IMAGE_ENCODER}: {told}"])
            raise
        self._model: Any = model.to(self.device).eval().requires_grad_(False)
        self._folder = where
        self.width = int(model.config.projection_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        kind: torch.dtype = self._model.dtype
        return kind

    @property
    def pieces(self) -> tuple[EncoderPiece, ...]:
        """The encoder as one layer, of ``pixels`` [1, 3, h, w] on any device."""

        def embed(states: States) -> States:
            found = self._model(self._resized(states[PIXELS])).image_embeds
            return {EMBEDDING: found.float()[None]}

        return (EncoderPiece(IMAGE_ENCODER, embed, (self._model,)),)

    @torch.no_grad()
    def __call__(self, picture: Tensor) -> Tensor:
        """Embedding fp32 ``[1, width]`` of a picture ``[3, h, w]`` in [-1, 1]."""
        (found,) = run_pieces(self.pieces, {PIXELS: picture[None]})[EMBEDDING]
        if not all_finite({IMAGE_ENCODER: found}):
            require(self._folder.parent, [not_finite(IMAGE_ENCODER, self.dtype)], CHECK)
        return found.cpu()

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
        return f"{_KIND} {dtype} {digest_of(self._folder)}"
