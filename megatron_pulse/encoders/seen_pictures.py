"""Pictures that a text encoder reads beside the prompt, as Qwen-Image-Edit's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.templates import rendering
from megatron_pulse.encoders.tokens import require
from megatron_pulse.errors import describe_exception
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json

_PROCESSOR = "processor"
_SIDE = 32
"""The sides of a resized picture are multiples of it."""
_AREAS = {"QwenImageEditPipeline": 1024**2, "QwenImageEditPlusPipeline": 384**2}
"""Pixels of the picture that the encoder sees, by the pipeline's class."""


class SeenPictures:
    """Inputs of Qwen2.5-VL for a prompt and a picture.

    Nothing is downloaded. Raises EncodersError with what the pipeline ``folder`` lacks.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        import transformers

        index = read_json(folder / PIPELINE_INDEX, FileKind.PIPELINE)
        named = str(index.get("_class_name"))
        if named not in _AREAS:
            known = " or ".join(_AREAS)
            require(folder, [f"{PIPELINE_INDEX} names {named}; the backbone's is {known}"])
        if not (folder / _PROCESSOR / "preprocessor_config.json").is_file():
            require(folder, [f"{_PROCESSOR}/preprocessor_config.json is missing"])
        try:
            kind = transformers.Qwen2VLImageProcessor
            self._images: Any = kind.from_pretrained(
                str(folder / _PROCESSOR), local_files_only=True
            )
        except Exception as error:  # transformers raises many types
            require(folder, [f"{_PROCESSOR}: {describe_exception(error)}"])
        self._area, self._tokenizer = _AREAS[named], tokenizer
        self._text = rendering(named, tokenizer).text

    def __call__(self, prompt: str, picture: Tensor) -> Mapping[str, Tensor]:
        """Arguments of the model's call for a picture ``[3, h, w]`` in [-1, 1]."""
        seen = self._images(images=[_resized(picture, self._area)], return_tensors="pt")
        grid = seen["image_grid_thw"]
        mark = getattr(self._tokenizer, "image_token", "<|image_pad|>")
        count = int(grid[0].prod()) // self._images.merge_size**2
        text = self._text(prompt).replace(mark, mark * count, 1)
        tokens = self._tokenizer([text], return_tensors="pt")
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "pixel_values": seen["pixel_values"],
            "image_grid_thw": grid,
        }


def _resized(picture: Tensor, area: int) -> Any:
    """The picture in about ``area`` pixels, resized as by the pipelines."""
    from PIL import Image

    pixels = ((picture + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    width = math.sqrt(area * (image.width / image.height))
    height = width / (image.width / image.height)
    sides = round(width / _SIDE) * _SIDE, round(height / _SIDE) * _SIDE
    return image.resize(sides, resample=Image.Resampling.LANCZOS)
