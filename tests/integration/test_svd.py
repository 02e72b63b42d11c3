"""SVD from films to films: its fields, EDM's first loss, layouts, and samples of its pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.fields import APART
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.noise import draw, first_frame_noise
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.sample_decoder import SampleDecoder
from megatron_pulse.recipe.examples import example_text
from tests.data.films import frames_by_pyav, write_film
from tests.integration.runs import BASE, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.ranks import run_ranks
from tests.svd_pipeline import FRAMES, SIDE, make_pipeline

pytest.importorskip("av")
EDM = chosen_process(ProcessChoice(objective="edm"))
STEPS = ["--global-batch-size", "4", "--train-iters", "2"]
WHOLE = ["--pulse-class-dropout", "0"]
"""Flags of a run that drops no first frame."""


@dataclass(frozen=True)
class Made:
    """Pipeline folder, imported checkpoint and written latents, and the pipeline itself."""

    root: Path
    pipeline: Any

    @property
    def flags(self) -> list[str]:
        """Those of a run from the imported weights on the latents."""
        module = f"diffusers:{self.root / 'pipeline/unet'}"
        weights = ["--pretrained-checkpoint", str(self.root / "checkpoint")]
        data = ["--pulse-data", f"latents:{self.root / 'latents'}"]
        return ["--pulse-module", module, *weights, *data, *STEPS, "--pulse-conditioning", "send"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("svd")
    whole = make_pipeline(root / "pipeline")
    assert main(["import", "--from", str(root / "pipeline"), "--to", str(root / "checkpoint")]) == 0
    for i in range(24):
        write_film(root / f"films/{i:02}.mkv", FRAMES + 2 * (i % 3), size=(SIDE, SIDE), rate=10)
    module = ["--module", f"diffusers:{root / 'pipeline/unet'}"]
    assert main([
        "data", "write-latents", "--from", f"videos:{root / 'films'}", "--image-size", str(SIDE),
        "--frames", str(FRAMES), "--encoders", str(root / "pipeline"), *module, "--dtype", "fp32",
        "--motion-bucket", "60", "--posterior", "mean", "-o", str(root / "latents"),
    ]) == 0  # fmt: skip
    return Made(root, whole)


def test_first_frames_are_written_as_the_pipeline_reads_them(made: Made) -> None:
    written, whole = LatentFolder(made.root / "latents"), made.pipeline
    assert written.image_shape == (FRAMES, 4, 8, 8)
    assert {*written.fields} >= {"image_latent", "image_embedding", "added_time_ids"}
    strengths = set()
    for i in range(3):
        given = written.conditioning(i)
        normal, noise = first_frame_noise(0, i, 0, (3, SIDE, SIDE))
        strength = torch.tensor(-3 + 0.5 * normal).exp().item()
        strengths.add(strength)
        clip = _clip(made.root / f"films/{i:02}.mkv", i)
        with torch.no_grad():
            latent = whole._encode_vae_image((clip[0] + strength * noise)[None], "cpu", 1, False)
            bits = ((clip[0].permute(1, 2, 0) + 1) * 127.5).round().byte()
            embedding = whole._encode_image(Image.fromarray(bits.numpy()), "cpu", 1, False)
            latents = whole.vae.encode(clip).latent_dist.mean * whole.vae.config.scaling_factor
        torch.testing.assert_close(given["image_latent"], latent.expand(FRAMES, -1, -1, -1))
        torch.testing.assert_close(given["image_embedding"], embedding[0], rtol=0, atol=1e-5)
        ids = torch.tensor([9, 60, strength])
        torch.testing.assert_close(given["added_time_ids"], ids, rtol=1e-6, atol=0)
        torch.testing.assert_close(written.image(i), latents, rtol=0, atol=1e-5)
    assert len(strengths) == 3


def _clip(path: Path, number: int) -> torch.Tensor:
    """Frames ``[f, 3, h, w]`` in [-1, 1] of the middle of a film."""
    first = (number % 3 * 2 + 1) // 2
    frames = frames_by_pyav(path)[first : first + FRAMES]
    return torch.from_numpy(np.stack(frames).astype(np.float32)).permute(0, 3, 1, 2) / 127.5 - 1


def test_parts_of_the_first_frame_are_dropped_apart(made: Made) -> None:
    written = LatentFolder(made.root / "latents")
    items = [(i % 24, i) for i in range(600)]
    batch = make_microbatch(written, items, EDM, seed=3, drop_probability=0.2)
    gone = [batch[name].flatten(1).eq(0).all(1) for name in APART]
    counts = [int((gone[0] & ~gone[1]).sum()), int((gone[0] & gone[1]).sum()),
              int((~gone[0] & gone[1]).sum())]  # fmt: skip
    assert all(90 < count < 150 for count in counts), counts
    assert torch.equal(gone[0] & gone[1], batch["dropped"])
    assert not batch["added_time_ids"].eq(0).all(1).any()
    whole = make_microbatch(written, items[:30], EDM, seed=3)
    assert not any(whole[name].flatten(1).eq(0).all(1).any() for name in APART)


def test_first_loss_is_that_of_svd_s_trainers(made: Made) -> None:
    """The weighted error of the denoised latents, in fp64, of diffusers' UNet."""
    seen = alone(*made.flags, *WHOLE, backbone="none")
    data, _ = open_dataset(f"latents:{made.root / 'latents'}")
    sampler = MicrobatchSampler(
        len(data), consumed_samples=0, micro_batch_size=4, data_parallel_rank=0,
        data_parallel_size=1, seed=1234,
    )  # fmt: skip
    errors = []
    for index, position in next(iter(sampler)):
        drawn, x0 = draw(1234, index, position, (FRAMES, 4, 8, 8)), data.image(index).double()
        sigma = math.exp(0.7 + 1.6 * NormalDist().inv_cdf(drawn.u))
        assert drawn.noise is not None
        noisy, given = x0 + sigma * drawn.noise.double(), data.conditioning(index)
        scaled = (noisy / (sigma**2 + 1) ** 0.5).float()
        with torch.no_grad():
            found = made.pipeline.unet(
                torch.cat([scaled, given["image_latent"]], 1)[None],
                torch.tensor([0.25 * math.log(sigma)]),
                given["image_embedding"][None],
                given["added_time_ids"][None],
            ).sample.double()
        denoised = -sigma / (sigma**2 + 1) ** 0.5 * found[0] + noisy / (sigma**2 + 1)
        weight = (1 + sigma**2) / sigma**2
        errors.append(weight * (denoised - x0).square().mean().item())
    assert seen.losses[0] == pytest.approx(sum(errors) / 4, rel=1e-5)


def test_a_pipeline_trains_as_one_process(made: Made, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    flags = [*made.flags, *WHOLE]
    assert_same(
        run(2, *flags, *pipeline(2), *save, backbone="none"), alone(*flags, backbone="none")
    )
    words = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--per-class", "1"]
    vae = ["--vae", str(made.root / "pipeline/vae")]
    out = tmp_path / "held-out.gif"
    assert main([*words, "--from-data", "2", "--guidance", "1,3", *vae, "-o", str(out)]) == 0
    assert main([*words, "--image", str(out), *vae, "-o", str(out)]) == 2  # embeds nothing


def test_encoders_in_the_loop_train_as_latents_written_ahead(made: Made, tmp_path: Path) -> None:
    """With parts of the first frame dropped, in a pipeline; held-out films are drawn."""
    films, choice = f"videos:{made.root / 'films'}", ["60", "0.1,0.4"]
    assert main([
        "data", "write-latents", "--from", films, "--image-size", str(SIDE), "--frames",
        str(FRAMES), "--encoders", str(made.root / "pipeline"), "--dtype", "fp32", "--module",
        made.flags[1], "--motion-bucket", choice[0], "--frame-noise", choice[1],
        "-o", str(tmp_path / "latents"),
    ]) == 0  # fmt: skip
    drops = ["--pulse-class-dropout", "0.3"]
    flags = [*made.flags, *drops]
    place = flags.index("--pulse-data") + 1
    flags[place] = f"latents:{tmp_path / 'latents'}"
    ahead = alone(*flags, backbone="none")
    flags[place] = films
    flags += ["--pulse-encoders", str(made.root / "pipeline"), "--pulse-clip-start", "middle"]
    flags += ["--pulse-motion-bucket", choice[0], "--pulse-frame-noise", choice[1]]
    save = ["--save", str(tmp_path / "kept")]
    assert_same(run(2, *flags, *pipeline(2), *save, backbone="none"), ahead)
    words = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--per-class", "1"]
    assert main([*words, "--from-data", "2", "-o", str(tmp_path / "held-out.gif")]) == 0


def test_samples_are_those_of_the_pipeline_and_of_its_export(made: Made, tmp_path: Path) -> None:
    """With noise on first frames, guidance from frame to frame, and another rate and motion."""
    pixels = torch.randint(256, (2, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(1))
    pictures = [Image.fromarray(each.byte().numpy()) for each in pixels]
    words = ["sample", "--load", str(made.root / "checkpoint"), "--per-class", "1"]
    words += ["--encoders", str(made.root / "pipeline"), "--noise", "diffusers", "--seed", "5"]
    words += ["--steps", "4", "--guidance", "1,3", "--fps", "9", "--motion-bucket", "100"]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
        words += ["--image", str(tmp_path / f"{i}.png")]
    tensors = str(tmp_path / "samples.safetensors")
    assert main([*words, "--frame-noise", "0.05", "-o", tensors]) == 0
    load, to = str(made.root / "checkpoint"), str(tmp_path / "exported")
    base = str(made.root / "pipeline")
    assert main(["export", "--load", load, "--raw", "--to", to, "--pipeline", base]) == 0
    exported = diffusers.StableVideoDiffusionPipeline.from_pretrained(to)
    exported.set_progress_bar_config(disable=True)
    latents, films = (
        exported(
            pictures, height=SIDE, width=SIDE, num_inference_steps=4, fps=9, motion_bucket_id=100,
            noise_aug_strength=0.05, generator=torch.Generator().manual_seed(5), output_type=kind,
        ).frames
        for kind in ("latent", "pt")
    )  # fmt: skip
    samples = load_file(tensors)["samples"]
    torch.testing.assert_close(samples, latents, rtol=0, atol=1e-5)
    decoded = SampleDecoder((FRAMES, 4, 8, 8), Autoencoder(made.root / "pipeline/vae"))(samples)
    torch.testing.assert_close(decoded / 2 + 0.5, films, rtol=0, atol=1e-4)


def test_what_svd_alone_reads_and_bears_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path))
    (fault,) = refuse(monkeypatch, 1, [*made.flags, "--pulse-class-dropout", "0.5"], BASE)
    assert "image_embedding alone, image_latent alone, and both" in fault
    words = [*by_buckets(made, tmp_path), "--vae", str(made.root / "pipeline/vae")]
    capsys.readouterr()
    assert main([*words, "--frame-noise", "0,0", "--motion-bucket", "9"]) == 2
    said = capsys.readouterr().err
    assert "--frame-noise is for a --backbone that reads" in said
    assert "--motion-bucket is for a --backbone that reads" in said
    assert not (tmp_path / "latents").exists()


def by_buckets(made: Made, folder: Path) -> list[str]:
    """Command that writes clips of the one size in a store of its own."""
    films = ["--from", f"videos:{made.root / 'films'}", "--frames", str(FRAMES)]
    size = ["--buckets", f"{SIDE}x{SIDE}", "--dtype", "fp32"]
    return ["data", "write-latents", *films, *size, "-o", str(folder / "latents")]


@pytest.mark.parametrize("options", [[], ["--option", "height=8", "--option", "width=8"]])
def test_clips_are_written_by_buckets(made: Made, tmp_path: Path, options: list[str]) -> None:
    """The help's command, with the latent's sides and without."""
    module = ["--module", f"diffusers:{made.root / 'pipeline/unet'}", *options]
    words = [*by_buckets(made, tmp_path), "--encoders", str(made.root / "pipeline"), *module]
    assert main([*words, "--motion-bucket", "60", "--posterior", "mean"]) == 0
    (store,) = (tmp_path / "latents").glob("*x*")
    written, expected = LatentFolder(store), LatentFolder(made.root / "latents")
    assert written.image_shape == (FRAMES, 4, 8, 8)
    assert torch.equal(written.image(1), expected.image(1))


def test_the_recipe_trains_and_draws(made: Made, tmp_path: Path) -> None:
    """In small: other weights, data and sizes, and nothing else of its text."""
    text = example_text("svd").replace("hf:stabilityai/stable-video-diffusion-img2vid", "PIPELINE")
    for name, value in {
        "runs/svd": tmp_path / "run", "PIPELINE": made.root / "pipeline",
        "height = 72": "height = 8", "width = 128": "width = 8",
        "latents:clips": f"latents:{made.root / 'latents'}",
    }.items():  # fmt: skip
        assert name in text
        text = text.replace(name, str(value))
    (tmp_path / "recipe.toml").write_text(text)
    words = ["training.steps=1", "training.batch_size=4", "training.micro_batch_size=2"]
    words += ["training.dtype=fp32", "parallel.pipeline=2", "parallel.solver=none"]
    words += ["validation.batches=0", "samples.steps=2", "optimizer.warmup_steps=0"]
    run_ranks(2, _train, [str(tmp_path / "recipe.toml"), *words])
    drawn = [*(tmp_path / "run/samples").rglob("*.*")]
    assert any(path.suffix in (".png", ".gif") for path in drawn), drawn


def _train(words: list[str]) -> None:
    """As in a process that torchrun starts."""
    assert main(["train", *words]) == 0
