"""What one of P ranks needs to start a derived chain: memory and seconds.

    .venv/bin/python -m tests.benchmarks.starts [MODEL] [--from scratch] [--pipeline P] [--rank R]

``folder``: a diffusers folder in bf16 of the model's published size is written to a temporary
place, of files that take no disk (all zeros), and removed. A fresh process derives the chain and
builds the stages of rank R (the one with the most parameters where it is not said), as a run does;
what it held at most is compared with its weights. ``scratch``: the same, from the class's own
initialisation, in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Flags, Report

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "flux-dev": (
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        {"height": "64", "width": "64"},
    ),
    "sdxl": (
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "block_out_channels": [320, 640, 1280],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        {},
    ),
    "tiny": (
        "FluxTransformer2DModel",
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 8,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 8,
            "axes_dims_rope": [4, 6, 6],
        },
        {"height": "8", "width": "8"},
    ),
}
"""Class, config and sizes of samples."""
_SHARD_BYTES = 10_000_000_000


def write_sparse(folder: Path, class_name: str, config: Mapping[str, Any]) -> int:
    """A folder as the class would save itself in bf16, of zeros that take no disk; its bytes."""
    import diffusers
    import torch

    with torch.device("meta"):
        module = getattr(diffusers, class_name).from_config(dict(config))
    module.save_config(folder)
    shards: list[dict[str, Any]] = [{}]
    ends = [0]
    for name, tensor in module.state_dict().items():
        size = 2 * tensor.numel()
        if ends[-1] + size > _SHARD_BYTES:
            shards.append({})
            ends.append(0)
        shards[-1][name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [ends[-1], ends[-1] + size],
        }
        ends[-1] += size
    stem, places = "diffusion_pytorch_model", {}
    for i, (header, end) in enumerate(zip(shards, ends, strict=True)):
        path = folder / f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        places |= dict.fromkeys(header, path.name)
    index = {"metadata": {"total_size": sum(ends)}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return sum(ends)


def held(what: str = "VmHWM") -> float:
    """GB that this process held at most (``RssFile``: holds now of files that it maps)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what)) / 1e9


def start(name: str, options: Mapping[str, str], size: int, rank: int | None) -> dict[str, Any]:
    """Derive the chain and build the stages of one rank, in this process."""
    from megatron_pulse.cli.import_megatron import prepare_megatron

    prepare_megatron()
    import torch

    import megatron_pulse as pulse
    from megatron_pulse.profile.parameters import count_parameters
    from megatron_pulse.runtime.stage import Stage
    from model_specs import load_backbone

    imported, begin = held(), time.perf_counter()
    backbone = load_backbone(name, options)
    counts = count_parameters(backbone)
    derived, derived_s = held(), time.perf_counter() - begin
    costs = pulse.weighted_costs(backbone, [1.0 + count for count in counts])
    plan = pulse.make_plan(backbone, costs, pulse.sequential(size))
    layers = [plan.partition.layers_of_stage(s) for s in range(size)]
    load = [sum(counts[i] for i in own) for own in layers]
    if rank is None:
        rank = max(range(size), key=load.__getitem__)
    begin = time.perf_counter()
    stage = Stage(backbone, plan.routes, rank, 0)
    built_s = time.perf_counter() - begin
    dtype = next(stage.parameters()).dtype
    return {
        "rank": rank,
        "parameters": (sum(counts), load[rank]),
        "dtype": str(dtype).removeprefix("torch."),
        "weights_gb": sum(p.numel() * p.element_size() for p in stage.parameters()) / 1e9,
        "imported_gb": imported,
        "derived_gb": derived,
        "most_gb": held(),
        "libraries_gb": held("RssFile"),
        "derived_s": derived_s,
        "built_s": built_s,
        "threads": torch.get_num_threads(),
    }


def measure(model: str, source: str, size: int, rank: int | None) -> dict[str, Any]:
    """``start`` in a process of its own."""
    class_name, config, sizes = MODELS[model]
    options = {**sizes, "dtype": "bfloat16" if source == "folder" else "float32"}
    with tempfile.TemporaryDirectory() as place:
        folder, total = Path(place), 0
        if source == "folder":
            total = write_sparse(folder, class_name, config)
        else:
            (folder / "config.json").write_text(json.dumps({"_class_name": class_name, **config}))
        asked = json.dumps([f"diffusers:{folder}", options, size, rank])
        command = [sys.executable, "-m", "tests.benchmarks.starts", "--start", asked]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {"folder_gb": total / 1e9, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add_argument("model", nargs="?", choices=sorted(MODELS), default="flux-dev")
    flags.add("--from", "folder", dest="source", choices=["folder", "scratch"])
    flags.add("--pipeline", 4)
    flags.add("--rank", type=int)
    flags.add("--start", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.start:
        print(json.dumps(start(*json.loads(args.start))))
        return
    found = measure(args.model, args.source, args.pipeline, args.rank)
    beside = {"beside_weights_gb": found["most_gb"] - found["weights_gb"]}
    where = {"model": args.model, "from": args.source, "pipeline": args.pipeline}
    Report(args.json).add(where | found | beside)


if __name__ == "__main__":
    main()
