"""Costs of the encoders of a pipeline folder, as components for bubble tasks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.components import autoencoder_faults
from megatron_pulse.encoders.encoder_piece import EncoderPiece, States
from megatron_pulse.encoders.image_pieces import MOMENTS, PIXELS
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_recipe import VAE, folder_name
from megatron_pulse.encoders.tokens import require
from megatron_pulse.errors import UserError
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.encoder_table import (
    EncoderOrigin,
    EncoderTable,
    component_records,
)
from megatron_pulse.profile.encoder_costs import measured, result_bytes, worked_out
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from megatron_pulse.profile.measurement.machine import measured_device, num_threads
from megatron_pulse.profile.profile import Source
from megatron_pulse.profile.roofline import Roofline
from megatron_pulse.runtime.tensor_settings import compute_device
from model_specs import text_recipe


def encoder_costs(
    folder: Path,
    name: str,
    backbone: Backbone,
    dtype: torch.dtype | None = None,
    roofline: Roofline | None = None,
    wanted: Collection[str] | None = None,
) -> EncoderTable:
    """Cost table of the encoders for the backbone of this name.

    Layers are measured here on one sample, or estimated for the device of ``roofline`` without
    reading weights. Without a ``dtype``, the dtypes are those in which a run encodes. ``wanted``
    are the folders of the encoders to read (None: all). Raises UserError.
    """
    if wanted is None:
        require(folder, autoencoder_faults(folder))
    dtypes: dict[str, str] = {}
    found = list(_components(folder, name, backbone, dtype, roofline, wanted, dtypes))
    if wanted is not None and not found:
        require(folder, [f"{backbone.name} reads no results of {', '.join(sorted(wanted))}"])
    records = component_records(found)
    for record in records:
        record["consumers"] = "ends" if record["name"] == VAE else "all"
    here = _device(weighs=True)
    origin = EncoderOrigin(
        backbone.record["name"],
        backbone.record["options"],
        measured_device(here, num_threads(here)) if roofline is None else roofline.device.name,
        Source.MEASURED if roofline is None else Source.ANALYTIC,
        num_threads(here) if roofline is None else 0,
        dtypes,
    )
    return EncoderTable(records, origin)


def _components(
    folder: Path,
    name: str,
    backbone: Backbone,
    dtype: torch.dtype | None,
    roofline: Roofline | None,
    wanted: Collection[str] | None,
    dtypes: dict[str, str],
) -> Iterator[Component]:
    def is_wanted(called: str) -> bool:
        return wanted is None or called in wanted

    weighs = roofline is None
    device = _device(weighs)
    if (recipe := text_recipe(name, backbone)) is not None:
        shapes = {field: backbone.batch_fields[field].shape for field in recipe.fields}
        called = {place: folder_name("text_encoder", place) for place in recipe.kinds}
        places = [place for place in called if is_wanted(called[place])]
        texts = TextEncoders(folder, recipe, shapes, dtype, places if weighs else ())
        for place in places:
            encoder, length = texts.encoders[place], texts.tokenizers.lengths[place]
            ids = torch.ones(1, length, dtype=torch.int64, device=device)
            given = {"ids": ids, "mask": torch.ones_like(ids)}
            states = sorted(recipe.states_of(place))
            dtypes[called[place]] = str(encoder.dtype).removeprefix("torch.")
            yield _component(called[place], encoder.pieces, given, states, roofline)
    if is_wanted(VAE) and (folder / VAE).is_dir():
        vae = Autoencoder(folder / VAE, dtype or torch.float32, weighs)
        dtypes[VAE] = str(vae.dtype).removeprefix("torch.")
        if vae.is_video:
            raise UserError(f"{folder / VAE} encodes videos, ahead of training alone")
        sample = backbone.input_spec
        *_, height, width = max((sample.shape, *sample.others), key=math.prod)
        shape = (1, vae.in_channels, height * vae.factor, width * vae.factor)
        pixels = torch.zeros(shape, dtype=vae.dtype, device=device)
        yield _component(VAE, vae.pieces, {PIXELS: pixels}, [MOMENTS], roofline)


def _device(weighs: bool) -> torch.device:
    if not weighs:
        return torch.device("meta")
    return compute_device()


def _component(
    name: str,
    pieces: tuple[EncoderPiece, ...],
    given: States,
    results: list[str],
    roofline: Roofline | None,
) -> Component:
    device = next(iter(given.values())).device
    if roofline is None:
        costs = measured(pieces, given, device, RepetitionLimits())
    else:
        costs = worked_out(pieces, given, roofline)
    layers = tuple(
        FrozenLayer(
            cost.name,
            {1: cost.seconds},
            cost.parameter_bytes,
            cost.activation_bytes,
            cost.output_bytes,
        )
        for cost in costs
    )
    return Component(name, layers, result_bytes=result_bytes(pieces, given, results))
