"""Comparison of encoders with those that made the data of a model's training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron_pulse.data.data_record import recorded_data, recorded_provenance
from megatron_pulse.data.dataset import LATENT
from megatron_pulse.data.fields import made_otherwise
from megatron_pulse.data.latents.layout import META, Meta
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.components import pipeline_folder_faults
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.encoders.tokens import changed_since, recorded_by
from megatron_pulse.errors import UserError, format_faults


def require_same_encoders(encoders: TextEncoders, trained: argparse.Namespace) -> None:
    """Raise UserError if the model's training text was made by other encoders.

    The text is in its latents, or was encoded during training. Latents that do not name their
    encoder are not compared.
    """
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
    recorded = recorded_provenance(recorded_data(trained).get("", ()))
    if recorded is not None:
        return recorded
    data = trained.pulse_data or ""
    folder = Path(data.removeprefix("latents:"))
    if data.startswith("latents:") and (folder / META).is_file():
        return Meta.load(folder).layout.made_by
    return {}
