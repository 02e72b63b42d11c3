"""diffusers' classes at published configs: size, links, boundaries, skips, context parallelism.

    .venv/bin/python -m tests.benchmarks.classes --json classes.json

Modules are on the meta device. Columns:

- B: billions of parameters;
- links: places of a chain, without embedders;
- MB: bytes in bfloat16 that a sample's boundary has, the median over links, at the usual size;
- skips;
- trains: in full, with LoRA on attention, with tokens divided over two ranks (CP);
- refused: the rest, with the first reason.

``results/classes.csv`` has the rows of all models.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pulse.errors import Faults
from tests.benchmarks.report import Flags, Report, some_of


@dataclass(frozen=True)
class Model:
    """A class with a published config and its usual sizes."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Numbers of one model; zeros if no chain is made of it."""

    model: str
    kind: str
    B: float
    links: int
    MB: float
    skips: int
    trains: str
    refused: str


_WAN, _HUNYUAN = "WanTransformer3DModel", "HunyuanVideoTransformer3DModel"
_480P = {"height": 60, "width": 104}
_720P = {"height": 90, "width": 160}
_1B_WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_OMNIGEN = {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}
_KOLORS = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048, "encoder_hid_dim": 4096, "encoder_hid_dim_type": "text_proj",
    "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 5632,
    "sample_size": 128,
}  # fmt: skip
_K5 = {
    "in_visual_dim": 16, "out_visual_dim": 16, "visual_cond": True, "frames": 31,
    "height": 64, "width": 96,
}  # fmt: skip
MODELS: Mapping[str, Model] = {
    "Wan 2.1 1.3B": Model(_WAN, {**_1B_WAN, **_480P}),
    "Wan 2.1 T2V 14B": Model(_WAN, _480P),
    "Wan 2.1 I2V 14B": Model(
        _WAN, {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, **_480P}
    ),
    "Wan 2.2 5B (two times)": Model(
        _WAN,
        {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336,
         "num_layers": 30, "frames": 31, "height": 44, "width": 80, "known_frames": 1},
    ),
    "Wan VACE 14B": Model("WanVACETransformer3DModel", _480P),
    "ChronoEdit 14B": Model(
        "ChronoEditTransformer3DModel",
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    "SkyReels-V2 14B": Model(
        "SkyReelsV2Transformer3DModel",
        {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    ),
    "HunyuanVideo": Model(_HUNYUAN, {"guidance_embeds": True}),
    "HunyuanVideo 1.5": Model("HunyuanVideo15Transformer3DModel"),
    "Framepack": Model(
        "HunyuanVideoFramepackTransformer3DModel",
        {"has_image_proj": True, "has_clean_x_embedder": True},
    ),
    "LTX-Video 13B": Model(
        "LTXVideoTransformer3DModel",
        {"frames": 16, "height": 22, "width": 38, "num_layers": 48, "attention_head_dim": 128,
         "cross_attention_dim": 4096},
    ),
    "LTX-2 (video)": Model("LTX2VideoTransformer3DModel"),
    "CogVideoX 5B": Model(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "CogVideoX 1.5 5B": Model(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
         "patch_size_t": 2, "patch_bias": False, "sample_frames": 81, "sample_height": 96,
         "sample_width": 170},
    ),
    "Mochi": Model("MochiTransformer3DModel"),
    "Kandinsky 5 Lite": Model(
        "Kandinsky5Transformer3DModel",
        {**_K5, "model_dim": 1792, "ff_dim": 7168, "time_dim": 512},
    ),
    "Kandinsky 5 Pro": Model(
        "Kandinsky5Transformer3DModel",
        {**_K5, "model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_text_blocks": 4,
         "num_visual_blocks": 60, "axes_dims": [32, 48, 48]},
    ),
    "Sana-Video": Model("SanaVideoTransformer3DModel"),
    "Allegro": Model("AllegroTransformer3DModel"),
    "Latte": Model(
        "LatteTransformer3DModel",
        {"num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8,
         "num_layers": 28, "cross_attention_dim": 1152, "attention_bias": True, "patch_size": 2,
         "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
         "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
         "caption_channels": 4096},
    ),
    "EasyAnimate 5.1": Model(
        "EasyAnimateTransformer3DModel", {"in_channels": 16, "out_channels": 16, "patch_size": 2}
    ),
    "Cosmos-Predict2 14B": Model(
        "CosmosTransformer3DModel",
        {"num_attention_heads": 40, "num_layers": 36, "extra_pos_embed_type": None,
         "rope_scale": [1.0, 4.0, 4.0]},
    ),
    "Motif-Video": Model("MotifVideoTransformer3DModel"),
    "SVD": Model("UNetSpatioTemporalConditionModel", {"height": 72, "width": 128}),
    "I2VGen-XL": Model("I2VGenXLUNet"),
    "AnimateDiff": Model(
        "UNetMotionModel", {"cross_attention_dim": 768, "height": 64, "width": 64}
    ),
    "Qwen-Image": Model("QwenImageTransformer2DModel"),
    "Flux.1": Model("FluxTransformer2DModel", {"guidance_embeds": True}),
    "Flux.2": Model("Flux2Transformer2DModel"),
    "Chroma": Model("ChromaTransformer2DModel"),
    "Z-Image": Model("ZImageTransformer2DModel"),
    "HiDream": Model(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096],
         "axes_dims_rope": [64, 32, 32], "llama_layers": [*range(32)] + [31] * 16},
    ),
    "HunyuanImage 2.1": Model("HunyuanImageTransformer2DModel", {"text_embed_2_dim": 1472}),
    "AuraFlow": Model("AuraFlowTransformer2DModel", {"height": 128, "width": 128}),
    "Sana": Model("SanaTransformer2DModel"),
    "Lumina 2": Model("Lumina2Transformer2DModel"),
    "OmniGen": Model("OmniGenTransformer2DModel", _OMNIGEN),
    "CogView 4": Model(
        "CogView4Transformer2DModel",
        {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128},
    ),
    "Kolors": Model("UNet2DConditionModel", _KOLORS),
    "Ovis-Image": Model("OvisImageTransformer2DModel"),
    "LongCat-Image": Model(
        "LongCatImageTransformer2DModel", {"num_layers": 10, "num_single_layers": 20}
    ),
    "PRX": Model("PRXTransformer2DModel", {"axes_dim": [32, 32]}),
    "Krea 2": Model("Krea2Transformer2DModel"),
    "ERNIE-Image": Model("ErnieImageTransformer2DModel"),
}  # fmt: skip


def row(name: str) -> Row:
    """Derive a model's chain and look at it."""
    from megatron_pulse.adapters.adapter import Adapter
    from megatron_pulse.profile.parameters import count_parameters
    from megatron_pulse.profile.trainable import TrainedPart
    from megatron_pulse.tracing.context_parallel.divided_backbone import traffic_of
    from model_specs import load_backbone, trained_as

    model = MODELS[name]
    try:
        backbone = load_backbone(f"diffusers:{model.kind}", {"dtype": "bfloat16", **model.options})
    except ValueError as error:
        return Row(name, model.kind, 0.0, 0, 0.0, 0, "", f"all: {_first(error)}")
    links = [layer for layer in backbone.layers if not layer.embedder]
    sizes = [sum(spec.bytes_per_sample(2) for spec in layer.outputs) for layer in links[:-1]]
    trains, refused = ["full"], list[str]()
    for way, attempt in (
        ("LoRA", lambda: trained_as(backbone, TrainedPart(adapter=Adapter().to_record()))),
        ("CP", lambda: traffic_of(backbone, 2)),
    ):
        try:
            attempt()
            trains.append(way)
        except ValueError as error:
            refused.append(f"{way}: {_first(error)}")
    return Row(
        name,
        model.kind,
        sum(count_parameters(backbone)) / 1e9,
        len(links),
        statistics.median(sizes) / 1e6,
        len(backbone.skips),
        ", ".join(trains),
        "; ".join(refused),
    )


def _first(error: ValueError) -> str:
    """First fault of an error, with files of packages named as they are imported."""
    text = error.faults[0] if isinstance(error, Faults) else str(error)
    return re.sub(r"/\S*/site-packages/", "", text)


def line(found: Row) -> str:
    """Row of the README's table."""
    divided = "yes" if "CP" in found.trains else "no"
    cells = found.model, f"{found.B:.1f}", found.links, f"{found.MB:.0f}", found.skips, divided
    return f"|{'|'.join(map(str, cells))}|"


def main() -> None:
    """Derive and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    args = flags.parse_args()
    report = Report(args.json)
    for name in args.models:
        report.add(row(name))


if __name__ == "__main__":
    main()
