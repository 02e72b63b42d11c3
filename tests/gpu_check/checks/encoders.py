"""Frozen encoders: samples a second."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu_check.alone import options
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures


def encoders(bench: Bench) -> Figures:
    """Stable Diffusion's text encoder and autoencoder in their size with random weights; on a CPU
    tiny ones."""
    folder = bench.folder / "pipeline"
    given = {} if bench.on_gpu else _tiny()
    if not folder.exists():
        folder.mkdir()
        (_write_large if bench.on_gpu else _write_tiny)(folder)
    file = bench.folder / "encoders.json"
    backbone = "sd-v1.5" if bench.on_gpu else "sd-tiny"
    own = ["--backbone", backbone, *options(given), "--encoders", folder]
    bench.pulse("profile", *own, "--device", bench.machine.device, "-o", file)
    rows = []
    for component in json.loads(file.read_text())["components"]:
        seconds = sum(layer["seconds"]["1"] for layer in component["layers"])
        rows.append(
            {"encoder": component["name"], "layers": len(component["layers"]),
             "ms a sample": 1e3 * seconds, "samples/s": 1 / seconds}
        )  # fmt: skip
    assert len(rows) == 2, f"{[row['encoder'] for row in rows]} are not text and images"
    return {"encoders": rows}


def _tiny() -> dict[str, str]:
    from tests.integration.test_encoding import OPTIONS

    return OPTIONS


def _write_tiny(folder: Path) -> None:
    from tests.cli.test_data import make_vae
    from tests.encoders.pipelines import make_pipeline

    make_pipeline(folder, ("clip", 16, 16))
    make_vae(
        folder / "vae", in_channels=1, out_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip


def _write_large(folder: Path) -> None:
    import transformers
    from diffusers import AutoencoderKL

    from tests.encoders.pipelines import make_tokenizer

    config = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=77, projection_dim=768,
        eos_token_id=1, bos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    transformers.CLIPTextModel(config).eval().save_pretrained(folder / "text_encoder")
    make_tokenizer(folder / "tokenizer", "clip", 77)
    AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=512,
    ).save_pretrained(folder / "vae")  # fmt: skip
    (folder / "model_index.json").write_text("{}")
