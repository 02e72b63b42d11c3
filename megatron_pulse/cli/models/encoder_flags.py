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
    from megatron_pulse.encoders.autoencoder import Autoencoder
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

    if not any(name.startswith(("folder:", "captions:")) for name in names_of(source)):
        return ["--default-caption is for image files: folder:PATH or captions:PATH"]
    return []


def encoder_faults(args: argparse.Namespace) -> list[str]:
    """Faults of ``--encoders`` and ``--encoders-dtype``."""
    if args.encoders is None:
        return ["--encoders-dtype is for --encoders"] if args.encoders_dtype else []
    return pipeline_folder_faults(args.encoders)


def pipeline_folder_faults(encoders: Path) -> list[str]:
    """Fault if ``--encoders`` is not the folder of a diffusers pipeline."""
    index = "model_index.json"
    if not (encoders / index).is_file() and (encoders.parent / index).is_file():
        return [
            f"--encoders {encoders} is a part of a pipeline's folder: give --encoders "
            f"{encoders.parent}"
        ]
    if not (encoders / index).is_file():
        return [f"--encoders {encoders} holds no model_index.json of a diffusers pipeline"]
    return []


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
    if faults := pipeline_folder_faults(Path(used)):
        if args.prompt:
            remedy = "It encoded the captions of the training: give its new place as --encoders."
            raise UserError(format_faults("--prompt", faults, remedy))
        return
    args.encoders = Path(used)


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def require_same_encoders(encoders: TextEncoders, trained: argparse.Namespace) -> None:
    """Raise UserError if the model's training text was made by other encoders.

    The text is in its latents, or was encoded during training. Latents that do not name their
    encoder are not compared.
    """
    from megatron_pulse.data.fields import made_otherwise
    from megatron_pulse.encoders.text_encoders import TextEncoders
    from megatron_pulse.encoders.tokens import changed_since, recorded_by

    there = _made_by(trained)
    used, recorded = getattr(trained, "pulse_encoders", None), recorded_by(trained)
    if used is not None and not recorded and Path(used) != encoders.folder:
        if not pipeline_folder_faults(Path(used)):
            dtype = next(iter(encoders.encoders.values())).dtype
            loop = TextEncoders(used, encoders.recipe, encoders.shapes, dtype, places=())
            there = loop.made_by() | dict(there)
    faults = made_otherwise(encoders.made_by() | encoders.tokenizers.made_by(), there)
    faults += changed_since(encoders.folder, recorded)
    if faults:
        remedy = "Give the encoders of the training (and their --encoders-dtype)."
        raise UserError(format_faults(f"--encoders {encoders.folder}", faults, remedy))


def other_autoencoder(autoencoder: Autoencoder, trained: argparse.Namespace) -> str:
    """Warning that ``autoencoder`` is not that of the model's latents; empty if equal or unknown.

    Another decoder gives other pictures of the same latents, which is often wanted. Raises
    UserError if scale or shift differ, because the decoder would then be given other numbers.
    """
    from megatron_pulse.data.dataset import LATENT
    from megatron_pulse.encoders.tokens import recorded_by

    there = _made_by(trained).get(LATENT) or recorded_by(trained).get(VAE, "")
    if not there:
        return ""
    here, where = autoencoder.made_by(typed=False), autoencoder.folder
    if there.startswith(here):
        return ""
    if autoencoder.normalization() not in there:
        remedy = "Give the autoencoder of the training, or one that shares its latents."
        fault = f"it is {here}, the model's latents are of {there}"
        raise UserError(format_faults(f"the autoencoder {where}", [fault], remedy))
    return (
        f"the autoencoder {where} is {here}, the model's latents are of {there}: pictures are "
        "wrong unless both share their latents"
    )


def _made_by(trained: argparse.Namespace) -> Mapping[str, str]:
    """Encoder of each field of the model's training latents.

    Checkpoints of earlier versions do not record it; the latents do, if they still exist.
    """
    from megatron_pulse.data.data_record import recorded_data, recorded_provenance
    from megatron_pulse.data.latents.layout import META, Meta

    recorded = recorded_provenance(recorded_data(trained).get("", ()))
    if recorded is not None:
        return recorded
    data = trained.pulse_data or ""
    folder = Path(data.removeprefix("latents:"))
    if data.startswith("latents:") and (folder / META).is_file():
        return Meta.load(folder).layout.made_by
    return {}
