"""``pulse profile --encoders``: costs of the layers of frozen encoders."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import as_user_error
from megatron_pulse.cli.output import table
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.files import write_with_checksum
from megatron_pulse.profile.roofline import Roofline

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone


def run_encoders(
    args: argparse.Namespace,
    backbone: Backbone,
    roofline: Roofline | None,
    wanted: Collection[str] | None = None,
) -> None:
    """Find the costs of the encoders for ``backbone``, write them, and list them."""
    import torch

    from megatron_pulse.integration.planning.encoder_costs import encoder_costs

    named = args.dtype or (roofline.dtype if roofline is not None else None)
    dtype = None if named is None else getattr(torch, named)
    with as_user_error(ValueError):
        found = encoder_costs(args.encoders, args.backbone, backbone, dtype, roofline, wanted)
    write_with_checksum(args.output, json.dumps(found.record()) + "\n")
    where = roofline.device.name if roofline is not None else "this machine"
    dtypes = {} if found.origin is None else found.origin.dtypes
    rows = [["encoder", "layers", "type", "ms a sample", "MB of weights", "KB of results"]]
    for one in found.components:
        layers = one["layers"]
        rows.append(
            [
                one["name"],
                str(len(layers)),
                dtypes.get(one["name"], ""),
                f"{1e3 * sum(layer['seconds']['1'] for layer in layers):.3f}",
                f"{sum(layer['parameter_bytes'] for layer in layers) / 1e6:.1f}",
                f"{one['result_bytes'] / 1e3:.1f}",
            ]
        )
    print(f"encoders of {args.encoders} for {backbone.name}, one sample at a time, on {where}:")
    print("\n".join(table(rows, left=(0,))))
    if VAE not in dtypes and wanted is None:
        print(f"there is no {VAE}/: latents of pictures must be stored")
    print(
        f"written to {args.output}: pulse tune --profile PROFILE.json --cluster CLUSTER "
        f"--global-batch-size N --encoders {args.output} -o plan.json"
    )
