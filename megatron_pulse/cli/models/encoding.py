"""``--encoders`` and ``--encoders-dtype`` of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.encoders.recipe import VAE
from megatron_pulse.faults import UserError, told
from megatron_pulse.flag_fields import DTYPES

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.pipeline import TextEncoders
    from megatron_pulse.encoders.recipe import TextRecipe
    from megatron_pulse.encoders.tokens import Tokenizers


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """Add both."""
    add = parser.add_argument
    add(
        "--encoders",
        type=Path,
        metavar="DIR|hf:ID",
        help="a diffusers pipeline folder: text_encoder*/ and tokenizer*/, and vae/ unless --vae",
    )
    add(
        "--encoders-dtype",
        choices=list(DTYPES),
        help="of the encoders (default: the folder's for text and fp32 for the autoencoder; fp32 "
        "on a CPU); with fp16 an autoencoder keeps fp32 unless its force_upcast is false",
    )


def add_default_caption(parser: argparse.ArgumentParser) -> None:
    """Add ``--default-caption``."""
    parser.add_argument(
        "--default-caption",
        default="",
        metavar="TEXT",
        help="of pictures without a caption, or with an empty one (default: none)",
    )


def caption_faults(args: argparse.Namespace, source: str) -> list[str]:
    """Faults of a ``--default-caption`` without use."""
    if not args.default_caption:
        return []
    from megatron_pulse.data.build import names_of

    if not any(name.startswith(("folder:", "captions:")) for name in names_of(source)):
        return ["--default-caption is for image files: folder:PATH or captions:PATH"]
    return []


def encoder_faults(args: argparse.Namespace) -> list[str]:
    """Why ``--encoders`` names no folder of a pipeline."""
    if args.encoders is None:
        return ["--encoders-dtype is for --encoders"] if args.encoders_dtype else []
    return no_pipeline(args.encoders)


def no_pipeline(encoders: Path) -> list[str]:
    """Why ``--encoders`` is no folder of a pipeline."""
    index = "model_index.json"
    if not (encoders / index).is_file() and (encoders.parent / index).is_file():
        return [
            f"--encoders {encoders} is a part of a pipeline's folder: --encoders {encoders.parent}"
        ]
    if not (encoders / index).is_file():
        return [f"--encoders {encoders} holds no model_index.json of a diffusers pipeline"]
    return []


def autoencoder_folder(args: argparse.Namespace) -> Path | None:
    """``--vae``, or the one of ``--encoders``, if there is one."""
    vae: Path | None = args.vae
    if vae is None and args.encoders is not None and (args.encoders / VAE).is_dir():
        vae = args.encoders / VAE
    return vae


def open_encoders(
    args: argparse.Namespace, name: str, backbone: Backbone
) -> tuple[TextEncoders, Mapping[str, FieldSpec]] | None:
    """What makes the text fields that the backbone of this name reads, and these; None if it
    reads none. Raises UserError."""
    import torch

    from megatron_pulse.data.dataset import COMPUTE, FieldSpec
    from megatron_pulse.encoders.pipeline import TextEncoders

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
    """What makes the tokens that ``open_encoders`` encodes, as it does."""
    from megatron_pulse.encoders.tokens import Tokenizers

    read = _read_by(name, backbone)
    return None if read is None else Tokenizers(args.encoders, *read)


def _read_by(name: str, backbone: Backbone) -> tuple[TextRecipe, dict[str, tuple[int, ...]]] | None:
    """How the text that the backbone reads is made, and the shapes of its fields."""
    from model_specs import text_recipe

    recipe = text_recipe(name, backbone)
    if recipe is None:
        return None
    return recipe, {field: backbone.batch_fields[field].shape for field in recipe.fields}


def take_encoders_of(args: argparse.Namespace, trained: argparse.Namespace) -> None:
    """Let the encoders that a model was trained with be ``--encoders`` where none is given.

    Raises UserError for a prompt where they are gone.
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
    if faults := no_pipeline(Path(used)):
        if args.prompt:
            remedy = "It encoded the captions of the training: give its new place as --encoders."
            raise UserError(told("--prompt", faults, remedy))
        return
    args.encoders = Path(used)


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def require_same(encoders: TextEncoders, trained: argparse.Namespace) -> None:
    """Raise UserError if what a model was trained on has text of other encoders: its latents, or
    what it encoded itself.

    What is gone, or does not say what encoded it, is passed over.
    """
    from megatron_pulse.data.fields import made_otherwise
    from megatron_pulse.encoders.pipeline import TextEncoders
    from megatron_pulse.encoders.tokens import changed_since, recorded_by

    there = _latents_by(trained)
    used, recorded = getattr(trained, "pulse_encoders", None), recorded_by(trained)
    if used is not None and not recorded and Path(used) != encoders.folder:
        if not no_pipeline(Path(used)):
            dtype = next(iter(encoders.encoders.values())).dtype
            loop = TextEncoders(used, encoders.recipe, encoders.shapes, dtype, places=())
            there = loop.made_by() | dict(there)
    faults = made_otherwise(encoders.made_by() | encoders.tokenizers.made_by(), there)
    faults += changed_since(encoders.folder, recorded)
    if faults:
        remedy = "Give the encoders of the training (and their --encoders-dtype)."
        raise UserError(told(f"--encoders {encoders.folder}", faults, remedy))


def other_autoencoder(autoencoder: Autoencoder, trained: argparse.Namespace) -> str:
    """That an autoencoder is not the one whose latents a model was trained on; empty if it is, or
    is not known.

    One whose decoder was trained on gives other pictures of the same latents, which is often
    wanted. Raises UserError where scale or shift differ: its decoder is given other numbers.
    """
    from megatron_pulse.encoders.tokens import recorded_by

    there = _latents_by(trained).get("latent") or recorded_by(trained).get(VAE, "")
    if not there:
        return ""
    here, where = autoencoder.made_by(typed=False), autoencoder.folder
    if there.startswith(here):
        return ""
    if autoencoder.normalization() not in there:
        remedy = "Give the autoencoder of the training, or one that shares its latents."
        fault = f"it is {here}, the model's latents are of {there}"
        raise UserError(told(f"the autoencoder {where}", [fault], remedy))
    return (
        f"the autoencoder {where} is {here}, the model's latents are of {there}: pictures are "
        "right only where both share their latents"
    )


def _latents_by(trained: argparse.Namespace) -> Mapping[str, str]:
    """What made the fields of the latents that a model was trained on, if they are still there."""
    from megatron_pulse.data.latents.layout import META, Meta

    data = trained.pulse_data or ""
    folder = Path(data.removeprefix("latents:"))
    if data.startswith("latents:") and (folder / META).is_file():
        return Meta.load(folder).layout.made_by
    return {}
