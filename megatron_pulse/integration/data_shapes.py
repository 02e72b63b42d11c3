"""Shapes of a run's samples, decided by its data: the backbone's option ``buckets``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_pulse.data.build import DataName, names_of
from megatron_pulse.data.images.shapes import AUTO, Size, read_shapes
from megatron_pulse.data.latents.layout import META, Meta
from megatron_pulse.data.latents.stores import has_index, store_folders
from megatron_pulse.data.opened_images import VIDEOS, OpenedImages
from megatron_pulse.data.picture_choice import BUCKETS
from megatron_pulse.data.picture_shapes import picture_shapes
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.errors import UserError
from megatron_pulse.integration.checkpoint.starting_point import StartingPoint
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from model_specs import is_cascade, with_texts_of


def with_data_shapes(
    args: argparse.Namespace,
    options: PulseOptions,
    start: StartingPoint | None,
    images: OpenedImages,
) -> PulseOptions:
    """``options`` with the backbone's option ``buckets``, where the data decide it; ``args`` too.

    Shapes that flags ask for are found from the heads of all pictures, on every rank alike; a
    continued run keeps its own. Latents of several shapes have theirs. ``images`` are those that
    this start has opened. Raises ValueError.
    """
    choice, data = options.shapes, options.data
    asked = choice.resolution is not None or choice.buckets is not None
    if asked and is_cascade(options.backbone or ""):
        raise UserError("--pulse-resolution and --pulse-buckets do not apply to a cascade")
    if data is None or is_cascade(options.backbone or ""):
        return options
    if options.plan is not None:
        _require_planned(options)
        return options
    if BUCKETS in options.options:
        if asked:
            raise UserError(
                f"--pulse-option {BUCKETS} sets the model's shapes: give it, or --pulse-resolution "
                "and --pulse-buckets"
            )
        return options
    kinds = {DataName.of(name).kind for name in names_of(data)}
    if asked and VIDEOS in kinds:
        raise UserError(
            "--pulse-resolution and --pulse-buckets are for pictures. Give clips the shapes of the "
            "model: --pulse-option buckets=FRAMESxHEIGHTxWIDTH,..."
        )
    if asked:
        if kinds == {"latents"}:
            raise UserError(
                "--pulse-resolution and --pulse-buckets are for pictures; latents have the shapes "
                "with which they were written"
            )
        factor = _factor(options)
        shapes: list[tuple[int, ...]] = [*_kept(options, start)]
        if not shapes:
            pixels = picture_shapes(data, choice, factor, options.default_caption, images)
            shapes = [*_in_latents(pixels, factor)]
    elif kinds == {"latents"}:
        shapes = _stored(data)
    else:
        return options
    if len(shapes) < 2 and not asked:
        return options
    given = {BUCKETS: ",".join("x".join(map(str, shape)) for shape in shapes)}
    # Beside shapes, texts would have their default length.
    texts = with_texts_of(options.backbone, options.options, options.encoders)
    given |= {name: str(n) for name, n in texts.items() if name not in options.options}
    args.pulse_option = [*args.pulse_option, *(f"{name}={text}" for name, text in given.items())]
    return replace(options, options={**options.options, **given})


def _require_planned(options: PulseOptions) -> None:
    """Raise UserError for a list of shapes that are not those of the plan."""
    text, planned = options.shapes.buckets, str(options.options.get(BUCKETS) or "")
    if text in (None, AUTO) or not planned:
        return
    shapes = _in_latents(read_shapes(text or ""), _factor(options))
    named = [f"{height}x{width}" for height, width in shapes]
    if not {*planned.split(",")} <= {*named}:
        raise UserError(
            f"--pulse-buckets {text}: in the sizes of samples {','.join(named)}, but the plan is "
            f"for {planned}. Leave it out, or tune for these shapes"
        )


def _kept(options: PulseOptions, start: StartingPoint | None) -> list[Size]:
    """Shapes of the run that is continued by the same flags; in the model's sizes."""
    if start is None or not start.continued:
        return []
    before = start.saved.arguments
    same = all(
        getattr(before, f"pulse_{name}", None) == getattr(options.shapes, name)
        for name in vars(options.shapes)
    )
    text = start.saved.record.get("options", {}).get(BUCKETS)
    return [(h, w) for w, h in read_shapes(text)] if same and text else []


def _factor(options: PulseOptions) -> int:
    """Pixels a side of a sample's element: those of the autoencoder in the loop."""
    if options.encoders is not None and (vae := Path(options.encoders) / VAE).is_dir():
        return int(Autoencoder(vae, weighs=False).factor)
    return 1


def _in_latents(shapes: Sequence[Size], factor: int) -> list[Size]:
    """``shapes`` of pictures in the sizes of the samples that they become."""
    return [(height // factor, width // factor) for height, width in shapes]


def _stored(data: str) -> list[tuple[int, ...]]:
    """Shapes of the stores of ``data``: (height, width), or (frames, height, width) of videos."""
    folders = list[Path]()
    for name in names_of(data):
        place = Path(DataName.of(name).path)
        folders += store_folders(place) if has_index(place) else [place]
    layouts = [Meta.load(folder).layout for folder in folders if (folder / META).is_file()]
    return list(dict.fromkeys(layout.shape[1:] for layout in layouts))
