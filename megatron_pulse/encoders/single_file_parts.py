"""Components of a diffusers pipeline in one original file, read by diffusers' conversions.

SD and SDXL files hold ``first_stage_model.*``, ``cond_stage_model.*`` or
``conditioner.embedders.*`` beside the backbone, SD3 files ``text_encoders.*``. Configurations and
tokenizers are in no such file: they come from a folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.published_weights import PublishedError

if TYPE_CHECKING:
    from torch import Tensor

_AUTOENCODER = "AutoencoderKL"
_AUTOENCODER_PREFIXES = ("first_stage_model.", "vae.")
_TEXTS = (
    "cond_stage_model.",
    "conditioner.embedders.",
    "text_encoders.",
)


def autoencoder_or_text_encoder(
    stored: Mapping[str, Tensor], base: Path, name: str, library: str, class_name: str
) -> Any:
    """Module of the component ``name`` of the pipeline in ``base``, with the weights of a file.

    ``stored`` are the file's tensors. An empty ``name`` stands for an autoencoder in ``base``
    itself. None if the file lacks the component. Raises PublishedError that lists all tensors that
    are missing.
    """
    from diffusers.loaders import single_file_utils as utils
    from diffusers.loaders.single_file import load_single_file_sub_model

    is_autoencoder = class_name == _AUTOENCODER
    prefixes = _AUTOENCODER_PREFIXES if is_autoencoder else _TEXTS
    if name or any(one.startswith(_AUTOENCODER_PREFIXES) for one in stored):
        tensors = {one: stored[one] for one in stored if one.startswith(prefixes)}
    else:
        tensors = dict(stored)
    if not tensors or library not in ("diffusers", "transformers"):
        return None
    kind = getattr(importlib.import_module(library), class_name, None)
    if is_autoencoder:
        there = True
    else:
        is_t5 = class_name == "T5EncoderModel"
        there = kind is not None and bool(
            utils.is_t5_in_single_file(tensors)
            if is_t5
            else utils.is_clip_model_in_single_file(kind, tensors)
        )
    if not there:
        return None
    what = f"{name or class_name} of the file"
    try:
        module = load_single_file_sub_model(
            library, class_name, name or None, tensors, None, False, str(base),
            local_files_only=True,
        )  # fmt: skip
    except Exception as error:  # of many types, for files of other models
        raise PublishedError(what, [f"diffusers' conversion: {error}"]) from error
    # diffusers puts the identity there
    projection = tensors.get("text_encoders.clip_l.transformer.text_projection.weight")
    if projection is not None and name == "text_encoder":
        module.text_projection.weight.data.copy_(projection)
    if library == "transformers":
        module.tie_weights()
    if missing := [one for one, tensor in module.state_dict().items() if tensor.is_meta]:
        raise PublishedError(what, [f"{one} is missing" for one in missing])
    return module
