"""Two experts, each for its range of times: samples of diffusers' Wan 2.2, and refusals."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from tests.encoders.test_videos import WAN
from tests.integration.clips import SHAPE, write_clips
from tests.integration.runs import run

SIZES = {"frames": 2, "height": 4, "width": 4, "text_length": 6}
STEPS = ["--global-batch-size", "2", "--train-iters", "1", "--pulse-conditioning", "send"]


def test_samples_are_those_of_wan_2_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of experts that were trained each in its range, where their ranges meet."""
    write_clips(tmp_path / "data")
    names = {"high": "transformer", "low": "transformer_2"}
    ranges = {"high": ["--pulse-min-time", "0.875"], "low": ["--pulse-max-time", "0.875"]}
    for seed, name in enumerate(names):
        flags = ["--pulse-backbone", "diffusers:WanTransformer3DModel", "--seed", str(seed + 1)]
        options = {**WAN, **SIZES, "in_channels": 4}
        flags += [w for n, v in options.items() for w in ("--pulse-option", f"{n}={v}")]
        flags += ["--pulse-objective", "flow", "--pulse-flow-shift", "3", "--lr", "1e-2"]
        data = ["--pulse-data", f"latents:{tmp_path / 'data'}", "--pulse-ema-decay", "0"]
        save = ["--save", str(tmp_path / name / "run"), "--save-interval", "1"]
        run(1, *flags, *STEPS, *data, *ranges[name], *save, backbone="none")
        out = ["--raw", "--to", str(tmp_path / name / "out")]
        assert main(["export", "--load", str(tmp_path / name / "run"), *out]) == 0
    load = ["sample", "--raw", "--load", str(tmp_path / "high/run")]
    words = [
        *load,
        "--low-noise",
        str(tmp_path / "low/run"),
        "--from-data",
        "1",
        "--per-class",
        "1",
    ]
    words += ["--steps", "6", "--flow-grid", "scheduler", "--noise", "diffusers", "--seed", "4"]
    tensors = str(tmp_path / "samples.safetensors")
    scales = ["--guidance", "4", "--low-noise-guidance", "3"]
    assert main([*words, *scales, "-o", tensors]) == 0

    experts = {
        names[name]: diffusers.WanTransformer3DModel.from_pretrained(tmp_path / name / "out").eval()
        for name in names
    }
    pipeline = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, boundary_ratio=0.875, **experts,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn((1, *SHAPE), generator=torch.Generator().manual_seed(4))
    _, held_out = open_dataset(f"latents:{tmp_path / 'data'}")
    theirs = pipeline(
        height=32, width=32, num_frames=5, num_inference_steps=6, latents=noise, guidance_scale=4.0,
        guidance_scale_2=3.0, prompt_embeds=held_out.conditioning(0)["context"][None],
        negative_prompt_embeds=torch.zeros(1, 6, 8), output_type="latent",
    ).frames  # fmt: skip
    ours = load_file(tensors)["samples"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    again = ["-o", str(tmp_path / "again.safetensors")]
    capsys.readouterr()
    assert main([*words, "--boundary-ratio", "1", *again]) == 2
    assert "give --boundary-ratio (Wan 2.2: 0.875)" in capsys.readouterr().err
    swapped = [word.replace("high", "?").replace("low/", "high/") for word in words]
    swapped = [word.replace("?/", "low/") for word in swapped]
    assert main([*swapped, "--boundary-ratio", "0.875", *again]) == 2
    assert "exchange --load and --low-noise" in capsys.readouterr().err
    assert main([*load, "--boundary-ratio", "0.5", *again]) == 2
    assert "--boundary-ratio is for --low-noise" in capsys.readouterr().err
