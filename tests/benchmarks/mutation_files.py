"""A sound file of each kind, to be mutated: all of one small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_pulse.files import write_with_checksum
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.encoder_table import (
    EncoderOrigin,
    EncoderTable,
    component_records,
)
from megatron_pulse.planner.cluster.cluster import cluster, save_cluster
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.serialize import to_csv
from megatron_pulse.planner.trace.trace import save_trace
from megatron_pulse.profile.files import save_profile
from tests.plans import small_plan, small_profile, trace_of


def make(folder: Path, heavy: bool) -> None:
    """A sound file of each kind, all of one small model."""
    plan, profile = small_plan(), small_profile()
    save_plan(plan, folder / "plan.json")
    save_profile(profile, folder / "profile.json")
    save_trace(trace_of(plan, [plan.simulate_step().timeline] * 2), folder / "trace.json")
    save_cluster(cluster("cpu"), folder / "cluster.yaml", "A cluster")
    layers = tuple(FrozenLayer(f"layers.{i}", {1: 1e-3, 8: 6e-3}, 1e3, 1e2, 1e2) for i in range(3))
    origin = EncoderOrigin("small", {"depth": 3}, "cpu", "measured", 1, {"text": "float32"})
    table = EncoderTable(component_records([Component("text", layers, (), 1e2, (0, 1))]), origin)
    write_with_checksum(folder / "encoders.json", json.dumps(table.record()) + "\n")
    units = [
        {
            "name": f"unit {i}",
            "params": 1000 * (i + 1),
            "flops_fwd": 10**9,
            "flops_bwd": 2 * 10**9,
            "saved_act_bytes": 4096,
            "out_shapes": [[16, 8]],
            "out_numel": 128,
        }
        for i in range(8)
    ]
    skips = [{"id": "a", "src": 1, "dst": 6, "numel": 64}]
    _write(folder / "table.json", {"name": "ours", "units": units, "skips": skips})
    stages = {"forward": [1, 2.5, 2, 1], "input_grad": [1, 2, 2, 1], "weight_grad": [1, 2, 2, 1]}
    _write(folder / "times.json", {**stages, "link": [0.1, 0, 0.1], "activation": [1, 1, 2, 1]})
    (folder / "order.csv").write_text(to_csv(plan.schedule))
    if heavy:
        _make_heavy(folder)


def _make_heavy(folder: Path) -> None:
    import torch
    from PIL import Image

    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.latents.layout import LatentLayout
    from megatron_pulse.data.latents.writer import LatentWriter

    torch.set_num_threads(1)
    layout = LatentLayout(
        (4, 2, 2), 3, fields={"context": FieldSpec((2, 3), "compute")}, shard_size=4
    )
    with LatentWriter(folder / "latents", layout, nulls={"context": torch.zeros(2, 3)}) as writer:
        for i in range(6):
            writer.add(torch.full((4, 2, 2), float(i)), i % 3, {"context": torch.ones(2, 3)})
    (folder / "captions").mkdir()
    lines = []
    for i, text in enumerate(("a red bird", "两只鸟", "🙂 smile")):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(folder / f"captions/{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": text}))
    (folder / "captions/metadata.jsonl").write_text("\n".join(lines) + "\n")
    _make_pipeline(folder / "pipeline")
    # In a process of its own: a saved checkpoint leaves process groups behind.
    words = [sys.executable, "-m", "megatron_pulse.cli", "import", "--from", "pipeline"]
    subprocess.run([*words, "--to", "saved"], cwd=folder, check=True, capture_output=True)
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "events")) as events:
        for step in range(20):
            events.add_scalar("loss", 1 / (step + 1), step)
    next((folder / "events").iterdir()).rename(folder / "events/a.tfevents.0")


def _make_pipeline(folder: Path) -> None:
    """A tiny DiT as diffusers stores it, in several files, with its scheduler."""
    import torch
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=4,
        num_embeds_ada_norm=10, out_channels=8,
    )  # fmt: skip
    model.save_pretrained(folder / "transformer", max_shard_size="20KB")
    DDIMScheduler().save_pretrained(folder / "scheduler")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
