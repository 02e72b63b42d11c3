"""Bytes of one block's backward with slices of its tokens, for Wan 14B on 81 frames.

    .venv/bin/python -m tests.benchmarks.token_slices [--frames 21] [--slices 1,2,4,8]

A block of diffusers' ``WanTransformer3DModel`` at its published width, without memory for weights:
one sample in bf16, with flash attention. "saved" is what autograd keeps from forward to backward,
without parameters; "peak" what forward and backward hold at most beyond parameters and inputs; both
are of operators on meta tensors. "time" is forward and backward over those of whole tokens, by the
roofline of an H100.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.profile.analytic import count_work
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.profile.roofline import PRESETS, Roofline
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from tests.benchmarks.report import Flags, Report

SIZES = {"480p": (60, 104), "720p": (90, 160)}
"""Rows and columns of latents."""


def main() -> None:
    """Print a row for each size and number of slices."""
    flags = Flags(__doc__)
    flags.add("--frames", 21, "frames of latents; 21 are 81 frames of a film")
    flags.add("--slices", "1,2,4,8", "numbers of slices")
    args = flags.parse_args()
    prepare_megatron()
    report = Report(args.json)
    for size, (height, width) in SIZES.items():
        whole_s = 0.0
        for count in map(int, args.slices.split(",")):
            row = of_block(args.frames, height, width, count)
            whole_s = whole_s or row["seconds"]
            row = {"size": size, **row, "time": row["seconds"] / whole_s}
            shown = {name: f"{row[name] / 1e9:.1f}" for name in ("saved_bytes", "peak_bytes")}
            cells = {name.replace("_bytes", ", GB"): value for name, value in shown.items()}
            report.add(row, {"size": size, "slices": count, **cells, "time": f"{row['time']:.2f}"})


def of_block(frames: int, height: int, width: int, slices: int) -> dict[str, Any]:
    """Bytes and seconds of all layers that make one block, of which backward takes one at a time.

    The largest layer has the ``peak_bytes``; the block's ``saved_bytes`` are all layers'.
    """
    from model_specs import load_backbone

    sizes = {"frames": frames, "height": height, "width": width}
    backbone = load_backbone(
        "diffusers:WanTransformer3DModel", {**sizes, "num_layers": 1, "dtype": "bfloat16"}
    )
    roofline = Roofline(PRESETS["H100"], "bfloat16")
    found = {"slices": slices, "saved_bytes": 0, "peak_bytes": 0, "seconds": 0.0}
    with some_process_group(), torch.device("meta"):
        for index, layer in enumerate(backbone.layers):
            if not layer.name.startswith("blocks."):
                continue
            module = layer.build(meta_context("bfloat16"))
            set_token_slices([module], slices)
            work = count_work(backbone, index, module, 1, "bfloat16", RUNNING)
            found["saved_bytes"] += work.memory.kept.own_bytes
            found["peak_bytes"] = max(found["peak_bytes"], work.memory.peak_bytes)
            found["seconds"] += roofline.seconds((*work.forward, *work.backward))
    return found


if __name__ == "__main__":
    main()
