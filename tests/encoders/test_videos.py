"""Autoencoders of videos: diffusers' numbers, latents of clips, and their films."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from megatron_pulse.backbone.appended_fields import CLIP_STATES, SIGLIP_STATES
from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.latents.stores import LatentStores
from megatron_pulse.diffusion.grid import save_animation
from megatron_pulse.encoders.autoencoder import Autoencoder, AutoencoderError
from megatron_pulse.encoders.first_frame import first_frame_fields
from megatron_pulse.encoders.image_encoder import ImageEncoder
from megatron_pulse.encoders.sample_decoder import SampleDecoder
from megatron_pulse.integration.training_data import wanted_by
from model_specs import load_backbone, padding_frames
from tests.data.films import frames_by_pyav, write_film
from tests.encoders.pipelines import make_pipeline

WIDTHS = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
MEANS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 1.0, 0.5]}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": (
        "AutoencoderKLWan",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, **MEANS},
    ),
    "hunyuan": ("AutoencoderKLHunyuanVideo", {"latent_channels": 4, **WIDTHS}),
    "cogvideox": ("AutoencoderKLCogVideoX", {"latent_channels": 4, **WIDTHS}),
    "mochi": (
        "AutoencoderKLMochi",
        {
            "latent_channels": 4, "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4, "layers_per_block": (1,) * 5,
            "scaling_factor": 0.9, **MEANS,
        },
    ),
    "ltx": (
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 4, "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 8, 8, 8), "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1), "scaling_factor": 0.7,
        },
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    kind, settings = MADE[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**settings).eval()
    if name == "ltx":  # it keeps them with its weights
        model.latents_mean.copy_(torch.tensor(MEANS["latents_mean"]))
        model.latents_std.copy_(torch.tensor(MEANS["latents_std"]))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MADE)
def test_latents_and_videos_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    model, ours = make(name, tmp_path), Autoencoder(tmp_path)
    frames, side = 2 * ours.frame_factor + 1, 2 * ours.factor
    video = torch.rand(2, 3, frames, side, side, generator=torch.Generator().manual_seed(1))
    video = video * 2 - 1
    mean, deviation = ours.posterior(video)
    with torch.no_grad():
        posteriors = [model.encode(each).latent_dist for each in video.split(1)]
    shift, std = (torch.zeros(4), torch.ones(4)) if name in ("hunyuan", "cogvideox") else (
        torch.tensor(MEANS["latents_mean"]), torch.tensor(MEANS["latents_std"])
    )  # fmt: skip
    scale = (model.config.get("scaling_factor", 1.0) / std).view(1, -1, 1, 1, 1)
    expected = torch.cat([p.mean for p in posteriors]) - shift.view(1, -1, 1, 1, 1)
    spread = torch.cat([p.std for p in posteriors]) * scale
    of_ours = [x.transpose(1, 2) if ours.frames_first else x for x in (mean, deviation)]
    torch.testing.assert_close(of_ours, [expected * scale, spread], rtol=1e-6, atol=1e-6)
    assert mean.shape[1:] == ours.latent_shape((3, frames, side, side))
    assert mean.shape[1 if ours.frames_first else 2] == 3
    decoded = ours.decode(mean)
    with torch.no_grad():
        inner = torch.cat([p.mean for p in posteriors])
        pixels = model.decode(inner).sample.clamp(-1, 1)
    torch.testing.assert_close(decoded, pixels, rtol=0, atol=1e-4)
    drawn = SampleDecoder(tuple(mean.shape[1:]), ours)
    assert not drawn.faults() and drawn(mean).shape == (2, frames, 3, side, side)
    one, _ = ours.posterior(video[:, :, 0])
    assert one.shape[1:] == ours.latent_shape((3, side, side))


def make_tiled(name: str, folder: Path) -> Any:
    """Autoencoder whose tiles have 16 pixels a side, 8 apart."""
    model = make(name, folder)
    for side in ("height", "width"):
        setattr(model, f"tile_sample_min_{side}", 16)
        setattr(model, f"tile_sample_stride_{side}", 8)
        setattr(model, f"tile_overlap_factor_{side}", 0.5)
        setattr(model, f"tile_latent_min_{side}", 2)
    return model


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_tiles_are_those_of_diffusers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiled(name, tmp_path)
    whole, kind = Autoencoder(tmp_path), type(model)
    enable = kind.enable_tiling

    def enable_small(self: Any) -> None:
        sizes = {n: v for n, v in vars(model).items() if n.startswith("tile_")}
        vars(self).update(sizes)
        enable(self)

    monkeypatch.setattr(kind, "enable_tiling", enable_small)
    ours = Autoencoder(tmp_path, tiled=True)
    model.enable_tiling()
    video = torch.rand(2, 3, 5, 32, 40, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean, _ = ours.posterior(video)
    with torch.no_grad():
        latents = torch.cat([model.encode(each).latent_dist.mean for each in video.split(1)])
        pixels = model.decode(latents).sample.clamp(-1, 1)
    (theirs, _) = ours.normalized(torch.cat([latents, latents], 1))
    theirs = theirs.transpose(1, 2) if ours.frames_first else theirs
    assert torch.equal(mean, theirs)
    torch.testing.assert_close(ours.decode(mean), pixels, rtol=0, atol=1e-4)
    assert not torch.allclose(whole.posterior(video)[0], mean, rtol=0, atol=1e-3)
    assert ours.made_by().endswith("(float32, tiled)")
    assert ours.made_by(typed=False) == whole.made_by(typed=False)


def test_tiling_without_an_autoencoder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data", "write-latents", "--from", "digits8", "-o", str(tmp_path / "l")]
    assert main([*argv, "--vae-tiling"]) == 2
    assert "--vae-tiling needs an autoencoder: give --vae" in capsys.readouterr().err
    assert not (tmp_path / "l").exists()


def test_an_autoencoder_of_pictures_takes_videos_frame_by_frame(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(latent_channels=4, norm_num_groups=4, block_out_channels=(8,))
    model.save_pretrained(tmp_path)
    ours, video = Autoencoder(tmp_path), torch.rand(2, 3, 5, 8, 8) * 2 - 1
    mean, _ = ours.posterior(video)
    assert mean.shape[1:] == ours.latent_shape((3, 5, 8, 8)) == (4, 5, 8, 8)
    for frame in range(5):
        assert torch.equal(mean[:, :, frame], ours.encode(video[:, :, frame]))


def test_known_frames_are_those_of_wan_s_pipeline(tmp_path: Path) -> None:
    model, ours = make("wan", tmp_path), Autoencoder(tmp_path)
    parts = dict.fromkeys(("tokenizer", "text_encoder", "image_encoder", "image_processor"))
    pipeline = diffusers.WanImageToVideoPipeline(
        **parts, vae=model, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), transformer=None
    )
    clip = torch.rand(3, 9, 32, 32) * 2 - 1
    _, known = pipeline.prepare_latents(
        clip[None, :, 0], 1, 4, 32, 32, 9, torch.float32, torch.device("cpu")
    )
    shapes = {"known_mask": (4, 3, 4, 4), "known_video": (4, 3, 4, 4)}
    fields = first_frame_fields(shapes, clip, ours)
    assert torch.equal(fields["known_mask"], known[0, :4])
    torch.testing.assert_close(fields["known_video"], known[0, 4:], rtol=0, atol=1e-6)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLCosmos"}')
    with pytest.raises(AutoencoderError, match="describes AutoencoderKLCosmos; known are"):
        Autoencoder(tmp_path)


WAN = {
    "in_channels": 12, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
    "text_dim": 8, "freq_dim": 16, "ffn_dim": 24, "num_layers": 1, "rope_max_seq_len": 16,
    "text_length": 6,
}  # fmt: skip
BACKBONE = ["--backbone", "diffusers:WanTransformer3DModel"]


def options(**settings: object) -> list[str]:
    given = {**WAN, **settings}
    return [word for name, value in given.items() for word in ("--option", f"{name}={value}")]


def test_clips_become_latents_with_known_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    make("wan", tmp_path / "vae")
    ours = Autoencoder(tmp_path / "vae")
    for i in range(3):
        write_film(tmp_path / f"clips/{i}.mkv", 9 + i, size=(32, 32))
    write = ["data", "write-latents", "--from", f"videos:{tmp_path / 'clips'}", "--dtype", "fp32"]
    write += ["--vae", str(tmp_path / "vae"), "--image-size", "32"]
    sizes = options(frames=3, height=4, width=4)
    out = ["-o", str(tmp_path / "latents")]
    assert main([*write, "--frames", "9", *BACKBONE, *sizes, *out]) == 0
    written = LatentFolder(tmp_path / "latents")
    assert written.image_shape == (4, 3, 4, 4) and len(written) == 3
    assert written.made_by["known_video"] == ours.made_by()
    for i in range(3):
        first = (i + 1) // 2  # the middle of 9, 10, 11 frames
        frames = frames_by_pyav(tmp_path / f"clips/{i}.mkv")[first : first + 9]
        clip = torch.from_numpy(np.stack(frames).astype(np.float32)).permute(3, 0, 1, 2) / 127.5 - 1
        mean, _ = ours.posterior(clip[None])
        torch.testing.assert_close(written.image(i), mean[0], rtol=0, atol=1e-6)
        shapes = {name: spec.shape for name, spec in written.fields.items()}
        expected = first_frame_fields(shapes, clip, ours)
        for name, value in expected.items():
            torch.testing.assert_close(written.conditioning(i)[name], value, rtol=0, atol=1e-6)
    capsys.readouterr()
    assert main([*write, "--frames", "9", *BACKBONE, *sizes, *out]) == 0  # it is there
    assert main([*write, "--frames", "9", "--fps", "25", *BACKBONE, *sizes, *out]) == 2
    assert "frame stride 1 at 25 frames a second" in capsys.readouterr().err
    assert main([*write, "--frames", "8", "-o", str(tmp_path / "none")]) == 2
    assert "takes 4k + 1 frames, not 8: give --frames 5, or 9" in capsys.readouterr().err


def make_seeing(folder: Path, field: str) -> Any:
    """Vision encoder and processor of Wan 2.1 or HunyuanVideo 1.5, also written to ``folder``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 224, "patch_size": 14,
    }  # fmt: skip
    if field == CLIP_STATES:
        model: Any = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes))
        processor: Any = transformers.CLIPImageProcessor(size=224, crop_size=224)
    else:
        model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes))
        processor = transformers.SiglipImageProcessor(size={"height": 224, "width": 224})
    model.save_pretrained(folder / "image_encoder")
    of = "image_processor" if field == CLIP_STATES else "feature_extractor"
    processor.save_pretrained(folder / of)
    return model.eval(), processor


@pytest.mark.parametrize("field", [CLIP_STATES, SIGLIP_STATES])
def test_first_frames_are_seen_as_by_the_pipelines(field: str, tmp_path: Path) -> None:
    model, processor = make_seeing(tmp_path, field)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    with torch.no_grad():
        if field == CLIP_STATES:
            parts = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler", "transformer"))
            pipeline = diffusers.WanImageToVideoPipeline(
                image_encoder=model, image_processor=processor, **parts
            )
            theirs = pipeline.encode_image(picture, "cpu")
        else:
            kind = diffusers.HunyuanVideo15ImageToVideoPipeline
            theirs = kind._get_image_embeds(model, processor, picture, torch.device("cpu"))
    ours = ImageEncoder(tmp_path, field=field)
    made = ours(torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1)
    assert tuple(made.shape) == ours.shape == (256 + (field == CLIP_STATES), 8)
    assert torch.equal(made, theirs[0])


def writing_captioned_clips(root: Path, below: str = "") -> list[str]:
    """Command that writes the latents of two clips made in ``root``, by a pipeline there."""
    pytest.importorskip("av")
    folder = make_pipeline(root / "wan", "umt5")
    make("wan", folder / "vae")
    for i in range(2):
        write_film(root / f"clips/{below}{i}.mkv", 9, size=(32, 32))
        (root / f"clips/{below}{i}.txt").write_text("a red bird")
    films = ["--from", f"videos:{root / 'clips'}", "--image-size", "32", "--frames", "9"]
    return ["data", "write-latents", *films, "--dtype", "fp32", "--encoders", str(folder)]


def test_clips_become_latents_with_states_of_their_first_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that Wan 2.1 reads to continue a picture."""
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    write = [*writing_captioned_clips(tmp_path), *BACKBONE]
    folder = tmp_path / "wan"
    make_seeing(folder, CLIP_STATES)
    write += options(frames=3, height=4, width=4, added_kv_proj_dim=24)
    out = ["-o", str(tmp_path / "latents")]
    assert main([*write, "--option", "image_dim=16", *out]) == 2
    told = f"makes {CLIP_STATES} 257x8, the backbone reads 257x16"
    assert told in capsys.readouterr().err
    assert main([*write, "--option", "image_dim=8", *out]) == 0
    written = LatentFolder(tmp_path / "latents")
    made = {"context", "known_mask", "known_video", CLIP_STATES, "framing"}
    assert written.fields.keys() == made
    frame = torch.from_numpy(frames_by_pyav(tmp_path / "clips/0.mkv")[0].astype(np.float32))
    expected = ImageEncoder(folder, field=CLIP_STATES)(frame.permute(2, 0, 1) / 127.5 - 1)
    assert torch.equal(written.conditioning(0)[CLIP_STATES], expected)
    assert CLIP_STATES not in written.null_conditioning()


def test_tensors_beside_clips_become_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """VACE's control, which no encoder makes; training says where it would come from."""
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    write = writing_captioned_clips(tmp_path, "a/")
    write += ["--backbone", "diffusers:WanVACETransformer3DModel"]
    vace = {"in_channels": 4, "num_layers": 2, "vace_layers": "0,1", "vace_in_channels": 6}
    write += options(frames=3, height=4, width=4, **vace)
    bare = tmp_path / "bare"
    assert main([*write, "-o", str(bare)]) == 0
    sizes = {**WAN, **vace, "frames": 3, "height": 4, "width": 4}
    with pytest.raises(ValueError, match=r"control_hidden_states .* takes it from FOLDER.fields/"):
        chain = load_backbone("diffusers:WanVACETransformer3DModel", sizes)
        open_dataset(f"latents:{bare}", wanted=wanted_by(chain))
    beside = tmp_path / "clips.fields/a"
    beside.mkdir(parents=True)
    controls = torch.randn(2, 6, 3, 4, 4)
    save_file({"control_hidden_states": controls[0]}, beside / "0.safetensors")
    out = ["-o", str(tmp_path / "latents")]
    assert main([*write, *out]) == 2
    assert "1 file (a/1.safetensors) do not exist" in capsys.readouterr().err
    save_file(
        {"control_hidden_states": controls[1, :5], "x": controls[0]}, beside / "1.safetensors"
    )
    assert main([*write, *out]) == 2
    said = capsys.readouterr().err
    assert "control_hidden_states is 5x3x4x4, the backbone reads 6x3x4x4" in said
    assert "the backbone reads no x" in said
    assert "each with the same of control_hidden_states" in said
    for tensors, fault in (
        ({}, "there are no tensors"),
        ({"control_hidden_states": controls[1].to(torch.complex64)}, "is complex64"),
    ):
        save_file(tensors, beside / "1.safetensors")
        assert main([*write, *out]) == 2
        assert fault in capsys.readouterr().err
    save_file({"control_hidden_states": controls[1]}, beside / "1.safetensors")
    assert main([*write, *out]) == 0
    written, _ = open_dataset(
        f"latents:{tmp_path / 'latents'}", wanted=wanted_by(chain), validation_fraction=0.0
    )
    for i in range(2):
        assert torch.equal(written.conditioning(i)["control_hidden_states"], controls[i])


def test_clips_of_several_lengths_become_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    make("wan", tmp_path / "vae")
    for i in range(4):
        write_film(tmp_path / f"clips/{i}.mkv", 5 + 4 * (i % 2), size=(32, 32))
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"clips/still{i}.png")
    assert main([
        "data", "write-latents", "--from", f"videos:{tmp_path / 'clips'}", "--buckets", "32x32",
        "--frames", "1,5,9", "--vae", str(tmp_path / "vae"), "-o", str(tmp_path / "latents"),
    ]) == 0  # fmt: skip
    stores = LatentStores(tmp_path / "latents")
    assert sorted(each.image_shape for each in stores._stores) == [(4, n, 4, 4) for n in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "latents").iterdir() if path.is_dir()) == [
        "32x32x1", "32x32x5", "32x32x9",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_videos_are_written_side_by_side(suffix: str, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    videos = torch.linspace(-1, 1, 6).view(1, 6, 1, 1, 1).expand(2, 6, 3, 16, 16)
    path = save_animation(videos, tmp_path / f"a{suffix}", 2, fps=8.0)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == pytest.approx(8, abs=0.5)
    assert len(frames) == 6 and frames[0].shape[1] >= 38
    levels = [float(frame[10, 10].mean()) for frame in frames]
    assert levels == pytest.approx([0, 51, 102, 153, 204, 255], abs=8)


def test_noise_offset_is_that_of_a_channel_of_all_frames() -> None:
    from megatron_pulse.data.dataset import ArrayDataset
    from megatron_pulse.data.microbatches import make_microbatch
    from megatron_pulse.diffusion.loss import LossChoice
    from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

    videos = ArrayDataset(np.zeros((2, 3, 4, 5, 5), np.float32), np.zeros(2), 1)
    process = DiffusionProcess(Objective.EPSILON)
    plain, offset = (
        make_microbatch(videos, [(0, 0), (1, 1)], process, 3, loss=LossChoice(noise_offset=x))
        for x in (0.0, 0.1)
    )
    difference = offset["target"] - plain["target"]
    assert difference.std() > 0.01
    assert (difference.flatten(2).std(2) < 1e-6).all()


def test_frames_of_cogvideox_1_5_are_scaled_and_padded_as_by_its_pipeline(tmp_path: Path) -> None:
    kind, settings = MADE["cogvideox"]
    torch.manual_seed(0)
    given = {**settings, "invert_scale_latents": True, "scaling_factor": 0.7}
    model = getattr(diffusers, kind)(**given).eval()
    model.save_pretrained(tmp_path)
    ours, clip = Autoencoder(tmp_path), torch.rand(3, 9, 32, 32) * 2 - 1
    found = first_frame_fields({"image_latent": (4, 4, 4, 4)}, clip, ours)["image_latent"]
    with torch.no_grad():
        first = model.encode(clip[None, :, :1]).latent_dist.mean[0].transpose(0, 1)
        torch.testing.assert_close(found[:1], first / 0.7, rtol=0, atol=1e-6)
        assert not found[1:].any()
        config = {"sample_frames": 9, "temporal_compression_ratio": 4, "patch_size_t": 2}
        record = {"family": "CogVideoXTransformer3DModel", "options": config}
        latents = torch.randn(1, 4, 4, 4, 4)
        pipeline = diffusers.CogVideoXPipeline(None, None, model, None, None)
        theirs = pipeline.decode_latents(latents[:, 1:]).clamp(-1, 1).transpose(1, 2)
    decoder = SampleDecoder((4, 4, 4, 4), ours, padding_frames(record))
    torch.testing.assert_close(decoder(latents), theirs, rtol=0, atol=1e-4)
