"""Recognition of original single-file checkpoints by their tensor names.

The makers of models and ComfyUI store a model in one file under other names than diffusers. The
file holds the whole model or its backbone alone. ``pulse import`` reads the backbones of ``READ``
(see ``single_file``), ``pulse unpack`` other components too. Elsewhere, and for other models,
diffusers converts such files (``from_single_file``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_WHOLE = r"(?:model\.)?diffusion_model\."
_LAYOUTS = (
    (rf"(?:{_WHOLE})?(?:head\.modulation|blocks\.\d+\.cross_attn\.)", "WanTransformer3DModel"),
    (rf"{_WHOLE}joint_blocks\.\d+\.", "StableDiffusion3Pipeline"),
    (rf"{_WHOLE}double_blocks\.\d+\.", "FluxTransformer2DModel"),
    (r"conditioner\.embedders\.\d+\.", "StableDiffusionXLPipeline"),
    (r"control_model\.", "ControlNetModel"),
    (_WHOLE, "StableDiffusionPipeline"),
    (r"first_stage_model\.", "AutoencoderKL"),
    (r"(?:encoder\.down|decoder\.up)\.\d+\.block\.\d+\.", "AutoencoderKL"),
    (r"joint_blocks\.\d+\.(?:x|context)_block\.", "SD3Transformer2DModel"),
    (r"double_blocks\.\d+\.img_", "FluxTransformer2DModel"),
    (r"(?:input|output)_blocks\.\d+\.\d+\.", "UNet2DConditionModel"),
)
"""Patterns of tensor names, with the diffusers class that converts such a file; first
match wins."""


_UNET, _SD3, _FLUX = "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel"
_WAN = "WanTransformer3DModel"
READ: Mapping[str, str] = {
    **dict.fromkeys(("StableDiffusionPipeline", "StableDiffusionXLPipeline", _UNET), _UNET),
    **dict.fromkeys(("StableDiffusion3Pipeline", _SD3), _SD3),
    _FLUX: _FLUX,
    _WAN: _WAN,
}
"""Class of the backbone that ``pulse import`` reads of a file, by the class found for the file."""


def find_original(names: Iterable[str]) -> tuple[str, str] | None:
    """Name that tells an original layout, and diffusers' class for it; None for other files."""
    there = list(names)
    for begins, kind in _LAYOUTS:
        if found := next((name for name in there if re.match(begins, name)), None):
            return found, kind
    return None


def original_faults(path: Path, names: Iterable[str]) -> list[str]:
    """Faults of a file with tensors of these names: one with its remedy, or none."""
    if (original := find_original(names)) is None:
        return []
    found, kind = original
    read = "; 'pulse unpack' writes it as a folder, 'pulse import --from FILE' reads its backbone"
    return [
        f"{path.name} is an original single-file checkpoint ({found}), not a diffusers folder. "
        f"Convert it once with diffusers.{kind}.from_single_file('{path}')"
        ".save_pretrained(FOLDER), and give FOLDER" + read * (kind in READ)
    ]
