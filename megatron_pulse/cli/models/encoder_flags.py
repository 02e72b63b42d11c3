"""Flags for encoders that several commands share: ``--encoders`` and ``--encoders-dtype``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import add_flag
from megatron_pulse.dataclass_flags import DTYPES
from megatron_pulse.encoders.text_recipe import VAE, TextRecipe
from megatron_pulse.errors import UserError, format_faults

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.encoders.text_encoders import TextEncoders
    from megatron_pulse.encoders.tokens import Tokenizers


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--encoders`` and ``--encoders-dtype``."""
    add = partial(add_flag, parser)
    add(
        "--encoders DIR|hf:ID",
        "a diffusers pipeline folder: text_encoder*/ and tokenizer*/, and vae/ unless --vae",
        type=Path,
    )
    add(
        "--encoders-dtype",
        "of the encoders (default: the folder's for text and fp32 for the autoencoder; fp32 "
        "on a CPU); with fp16 an autoencoder keeps fp32 unless its force_upcast is false",
        choices=list(DTYPES),
    )


def add_vae_tiling(parser: argparse.ArgumentParser, does: str) -> None:
    """Add ``--vae-tiling``; the autoencoder ``does`` something in tiles."""
    add_flag(
        parser,
        "--vae-tiling",
        f"{does} large pictures in overlapping tiles, for less memory (diffusers' enable_tiling)",
        action="store_true",
    )


def add_default_caption(parser: argparse.ArgumentParser) -> None:
    """Add ``--default-caption``."""
    add_flag(
        parser,
        "--default-caption TEXT",
        "of pictures without a caption, or with an empty one (default: none)",
        default="",
    )


def caption_faults(args: argparse.Namespace, source: str) -> list[str]:
    """Fault of a ``--default-caption`` that ``source`` makes no use of."""
    if not args.default_caption:
        return []
    from megatron_pulse.data.build import names_of
    from megatron_pulse.data.opened_images import IMAGES

    if not any(name.partition(":")[0] in IMAGES for name in names_of(source)):
        return [f"--default-caption is for image files: {':PATH, '.join(IMAGES)}:PATH"]
    return []


def encoder_faults(args: argparse.Namespace) -> list[str]:
    """Faults of ``--encoders`` and ``--encoders-dtype``."""
    if args.encoders is None:
        return ["--encoders-dtype is for --encoders"] if args.encoders_dtype else []
    return encoder_folder_faults(args.encoders)


def encoder_folder_faults(encoders: Path) -> list[str]:
    """Fault if ``--encoders`` is not the folder of a diffusers pipeline."""
    from megatron_pulse.encoders.components import pipeline_folder_faults

    return [f"--encoders {fault}" for fault in pipeline_folder_faults(encoders)]


def autoencoder_folder(args: argparse.Namespace) -> Path | None:
    """Folder of ``--vae``, else the autoencoder in ``--encoders``, else None."""
    vae: Path | None = args.vae
    if vae is None and args.encoders is not None and (args.encoders / VAE).is_dir():
        vae = args.encoders / VAE
    return vae


def open_encoders(
    args: argparse.Namespace, name: str, backbone: Backbone
) -> tuple[TextEncoders, Mapping[str, FieldSpec]] | None:
    """Text encoders for the backbone of this name, and the specs of the fields that they make.

    None if the backbone reads no text. Raises UserError.
    """
    import torch

    from megatron_pulse.data.dataset import COMPUTE, FieldSpec
    from megatron_pulse.encoders.text_encoders import TextEncoders

    read = _read_by(name, backbone)
    if read is None:
        return None
    recipe, shapes = read
    dtype = getattr(torch, DTYPES[args.encoders_dtype]) if args.encoders_dtype else None
    encoders = TextEncoders(args.encoders, recipe, shapes, dtype)
    fields = {
        field: FieldSpec(shape, "int64" if field.endswith("_mask") else COMPUTE)
        for field, shape in shapes.items()
    }
    return encoders, fields


def open_tokenizers(args: argparse.Namespace, name: str, backbone: Backbone) -> Tokenizers | None:
    """Tokenizers for the input of ``open_encoders``."""
    from megatron_pulse.encoders.tokens import Tokenizers

    read = _read_by(name, backbone)
    return None if read is None else Tokenizers(args.encoders, *read)


def _read_by(name: str, backbone: Backbone) -> tuple[TextRecipe, dict[str, tuple[int, ...]]] | None:
    """Recipe of the text that the backbone reads, and the shapes of its fields."""
    from model_specs import text_recipe

    recipe = text_recipe(name, backbone)
    if recipe is None:
        return None
    return recipe, {field: backbone.batch_fields[field].shape for field in recipe.fields}


def take_encoders_of(args: argparse.Namespace, trained: argparse.Namespace) -> None:
    """Set ``--encoders`` to the encoders of the model's training, if the flag is not given.

    Raises UserError for a prompt if these encoders are gone.
    """
    used = getattr(trained, "pulse_encoders", None)
    if used is None:
        return
    was = trained.pulse_encoders_dtype
    if args.encoders_dtype not in (None, was or ("fp32" if _on_cpu() else None)):
        raise UserError(
            f"--encoders-dtype {args.encoders_dtype}: the model was trained with "
            f"{was or 'that of the folder'}: leave it out"
        )
    args.encoders_dtype = args.encoders_dtype or was
    if args.encoders is not None:
        return
    if faults := encoder_folder_faults(Path(used)):
        if args.prompt:
            remedy = "It encoded the captions of the training: give its new place as --encoders."
            raise UserError(format_faults("--prompt", faults, remedy))
        return
    args.encoders = Path(used)


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()
