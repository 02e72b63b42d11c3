"""``pulse profile --encoders``: what the layers of frozen encoders cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_pulse.cli.errors import mending
from megatron_pulse.cli.output import table
from megatron_pulse.files import replacing

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.encoders.pieces import Piece, States
    from megatron_pulse.planner.fill.components import Component
    from megatron_pulse.profile.devices import Roofline

VAE = "vae"


def run_encoders(args: argparse.Namespace, backbone: Backbone, roofline: Roofline | None) -> None:
    """Find the costs of what encodes for ``backbone``, write them, and list them."""
    from megatron_pulse.planner.fill.table import table_of_components

    with mending(ValueError):
        found = list(_components(args, backbone, roofline))
    content = table_of_components(found)
    for record in content["components"]:
        record["readers"] = "ends" if record["name"] == VAE else "all"
    with replacing(args.output) as beside:
        beside.write_text(json.dumps(content) + "\n")
    where = roofline.device.name if roofline is not None else "this machine"
    rows = [["encoder", "layers", "ms a sample", "MB of weights", "KB of results"]]
    for one in found:
        rows.append(
            [
                one.name,
                str(len(one.layers)),
                f"{1e3 * one.chain_s(1):.3f}",
                f"{one.parameter_bytes / 1e6:.1f}",
                f"{one.result_bytes / 1e3:.1f}",
            ]
        )
    print(f"encoders of {args.encoders} for {backbone.name}, one sample at a time, on {where}:")
    print("\n".join(table(rows, left=(0,))))
    print(f"written to {args.output}: pulse tune --encoders {args.output} -o plan.json")


def _components(
    args: argparse.Namespace, backbone: Backbone, roofline: Roofline | None
) -> Iterator[Component]:
    import torch

    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.images import MOMENTS, PIXELS
    from megatron_pulse.encoders.pipeline import TextEncoders
    from megatron_pulse.encoders.recipe import folder_name
    from model_specs import text_recipe

    weighs = roofline is None
    dtype = getattr(torch, args.dtype or (roofline.dtype if roofline else "float32"))
    device = torch.device("meta")
    if weighs:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = text_recipe(args.backbone, backbone)
    if recipe is not None:
        shapes = {name: backbone.batch_fields[name].shape for name in recipe.fields}
        texts = TextEncoders(args.encoders, recipe, shapes, dtype, None if weighs else ())
        for place, encoder in texts.encoders.items():
            length = texts.tokenizers.lengths[place]
            ids = torch.ones(1, length, dtype=torch.int64, device=device)
            states = sorted(map(str, recipe.states_of(place)))
            name = folder_name("text_encoder", place)
            given = {"ids": ids, "mask": torch.ones_like(ids)}
            yield _component(name, encoder.pieces, given, states, roofline)
    if (args.encoders / VAE).is_dir():
        vae = Autoencoder(args.encoders / VAE, dtype, weighs)
        _, height, width = backbone.input_spec.shape
        shape = (1, vae.in_channels, height * vae.factor, width * vae.factor)
        pixels = torch.zeros(shape, dtype=dtype, device=device)
        yield _component(VAE, vae.pieces, {PIXELS: pixels}, [MOMENTS], roofline)


def _component(
    name: str,
    pieces: tuple[Piece, ...],
    given: States,
    results: list[str],
    roofline: Roofline | None,
) -> Component:
    from megatron_pulse.planner.fill.components import Component, FrozenLayer
    from megatron_pulse.profile.encoders import measured, result_bytes, worked_out
    from megatron_pulse.profile.measuring.clock import Patience

    device = next(iter(given.values())).device
    if roofline is None:
        costs = measured(pieces, given, device, Patience())
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
    left = result_bytes(pieces, given, results)
    return Component(name, layers, result_bytes=left)
