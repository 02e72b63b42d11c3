"""``pulse data`` and ``pulse backbones``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.launcher_env import RankOfJob
from megatron_pulse.cli.main import main
from megatron_pulse.data.captions import WordEncoder
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.images.digits import load_digits
from megatron_pulse.data.images.emoji import FONT, PACKAGE
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.latents.layout import LatentLayout, LatentType, sha256_of
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.encoders.autoencoder import Autoencoder, AutoencoderError
from tests.data.captioned import captioned_digits
from tests.ranks import run_ranks
from tests.reference import unsealed_record


def test_backbones_prints_sizes_and_folds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backbones", "uvit-s", "sd-v1.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["backbone", "uvit-s", "sd-v1.5"]
    assert main(["backbones", "uvit-s", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_skips"] == 6 and row["num_layers"] == 28 and row["largest_fold"] == 14
    assert 44e6 < row["num_parameters"] < 45e6, "Table 1 of the U-ViT paper"


def test_backbones_lists_all_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    from model_specs import available

    assert main(["backbones", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(available())


def test_info_counts_samples_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", "digits8", "--image-size", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_training"] + report["num_validation"] == 1797
    assert report["shape"] == [1, 16, 16]
    assert sum(report["samples_per_class"].values()) == 1797
    assert main(["data", "info", "digits8"]) == 0
    assert "1x8x8" in capsys.readouterr().out


def test_info_takes_several_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And divided as a run divides them."""
    for i in range(20):
        Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(_in(tmp_path / "a") / f"{i}.png")
    for i in range(3):
        (_in(tmp_path / "b") / f"{i}.png").write_bytes((tmp_path / f"a/{i}.png").read_bytes())
        (tmp_path / f"b/{i}.txt").write_text("a copy")
    names = f"folder:{tmp_path / 'a'}", f"captions:{tmp_path / 'b'}"
    argv = [",".join(names), "--image-size", "8"]
    assert main(["data", "info", *argv, "--verify", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["datasets"]
    assert (first["dataset"], second["dataset"]) == names and second["longest_caption"] == 2
    assert (second["num_training"], second["num_validation"]) == (3, 0)
    assert main(["data", "info", *argv]) == 0
    assert "18 for training, 2 for validation\n" in capsys.readouterr().out
    assert main(["data", "check", *argv, "--default-caption", "any"]) == 0
    said = capsys.readouterr()
    assert "21 samples to train on, 2 held back" in said.out and "3 pictures" in said.out
    assert "no sample is left for validation" in said.err
    for kind in "ab":
        (tmp_path / f"{kind}/0.png").write_bytes(b"none")
    assert main(["data", "check", *argv]) == 2
    said = capsys.readouterr()
    assert "a/0.png" in said.err and "b/0.png" in said.err
    several = f"folder:{tmp_path / 'c'},folder:{tmp_path / 'd'}"
    for command in (["info", several], ["check", several]):
        assert main(["data", *command, "--image-size", "8"]) == 2
        said = capsys.readouterr()
        assert f"{tmp_path / 'c'}: " in said.err and f"{tmp_path / 'd'}: " in said.err
    latents = ["--from", several, "--image-size", "8", "-o", str(tmp_path / "latents")]
    assert main(["data", "write-latents", *latents]) == 2
    assert "it names 2 datasets" in capsys.readouterr().err


def _in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_info_describes_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "info", captioned_digits(tmp_path), "--image-size", "8"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fields"] == {} and report["longest_caption"] == 4
    assert main([*argv, "--verify"]) == 0
    assert (
        "such as 'a dark digit zero'; the median has 4 words, the longest 4"
        in capsys.readouterr().out
    )


def test_write_latents_keeps_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "latents"
    argv = ["data", "write-latents", "--from", captioned_digits(tmp_path), "--image-size", "8"]
    argv += ["--channels", "1", "--text-states", "5x6", "--dtype", "fp32", "-o", str(folder)]
    assert main(argv) == 0
    written = LatentFolder(folder, verify=True)
    fields = {
        "context": FieldSpec((5, 6)),
        "context_mask": FieldSpec((5,), "int64"),
        "framing": FieldSpec((6,), "int64"),
    }
    assert written.fields == fields and written.pixel_size == (8, 8)
    assert written.conditioning(3)["framing"].tolist() == [8, 8, 0, 0, 8, 8]
    encode = WordEncoder(fields)
    for found, text in (
        (written.conditioning(3), "a dark digit three"),
        (written.null_conditioning(), ""),
    ):
        assert found.keys() >= encode.fields.keys()
        assert all(torch.equal(found[name], value) for name, value in encode(text).items())
    assert main(["data", "info", f"latents:{folder}"]) == 0
    assert "context: 5x6 float32" in capsys.readouterr().out
    assert main(argv) == 0
    assert "already complete" in capsys.readouterr().out
    before = (folder / "context-00000.npy").read_bytes()
    for damage in (b"", before[:-1] + bytes([before[-1] ^ 1])):
        (folder / "context-00000.npy").write_bytes(damage)
        assert main(argv) == 0
        assert "shards 0 are damaged; encoded anew" in capsys.readouterr().out
        assert (folder / "context-00000.npy").read_bytes() == before
    sharded = [*argv[:-1], str(tmp_path / "sharded"), "--shard-size", "4"]
    assert main(sharded) == 0
    picture = tmp_path / "captions" / "6.png"
    Image.new("L", (8, 8), 9).save(picture)
    shards = {f: f.stat().st_mtime_ns for f in (tmp_path / "sharded").glob("latent-*")}
    assert as_rank(1, 2, sharded) == 2
    assert "Give the command on one rank once" in capsys.readouterr().err
    assert main(sharded) == 0
    assert "6.png); shards encoded anew: 1\n" in capsys.readouterr().out
    touched = [f.name for f, before in shards.items() if f.stat().st_mtime_ns != before]
    assert touched == ["latent-00001.npy"]
    anew = LatentFolder(tmp_path / "sharded", verify=True)
    assert (anew.image(6) == 9 / 127.5 - 1).all() and torch.equal(anew.image(3), written.image(3))


@pytest.mark.skipif(not FONT.is_file(), reason=f"needs {FONT}: install {PACKAGE}")
def test_emoji_renders_pictures_with_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "emoji"
    argv = ["data", "emoji", "--to", str(folder), "--size", "16", "--limit", "20"]
    assert main(argv) == 0
    assert f"20 emoji of 16x16: {folder}" in capsys.readouterr().out
    assert main(["data", "info", f"captions:{folder}", "--image-size", "16", "--verify"]) == 0
    assert main(argv) == 2
    assert "not empty" in capsys.readouterr().err


def test_check_reads_every_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what becomes of pictures: listed twice, small, of another shape, transparent."""
    rng = np.random.default_rng(0)
    shapes = {"a": (9, 9, 3), "b": (20, 16, 3), "c": (6, 9, 4), "d": (8, 8, 3)}
    rows = [{"file_name": f"{name}.png", "text": name} for name in (*shapes, "d", "e", "e")]
    for name, shape in shapes.items():
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "e.png").write_text("no image")
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["data", "check", f"captions:{tmp_path}", "--image-size", "8"]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert (
        f"{tmp_path}: 5 pictures, 2 cropped to the central square, 1 smaller than 8x8" in told.out
    )
    assert "1 with transparency, which is ignored, 1 cannot be read (all decoded)" in told.out
    assert "held back" in told.out and told.err.count("e.png: not an image") == 1
    (tmp_path / "e.png").write_bytes((tmp_path / "d.png").read_bytes())
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (folder,) = report["folders"]
    assert folder["pictures"] == 5 and folder["unreadable"] == []
    assert report["num_training"] + report["num_validation"] == 7
    with LatentWriter(tmp_path / "l", LatentLayout((1, 2, 2), 1, LatentType.FLOAT32)) as writer:
        for _ in range(4):
            writer.add(torch.randn(1, 2, 2), 0)
    assert main(["data", "check", f"latents:{tmp_path / 'l'}"]) == 0
    path = tmp_path / "l" / "latent-00000.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert main(["data", "check", f"latents:{tmp_path / 'l'}"]) == 2


def test_verify_lists_every_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (9, 9)).save(tmp_path / name / f"{i}.png")
        (tmp_path / name / "bad.png").write_text("no image")
    argv = ["data", "info", f"folder:{tmp_path}", "--image-size", "8"]
    assert main(argv) == 0
    assert main([*argv, "--verify"]) == 2
    err = capsys.readouterr().err
    assert "a/bad.png: not an image" in err and "b/bad.png: not an image" in err


def test_verify_reads_the_rows_of_latents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever edits a file may leave all hashes out, and tell its new SHA-256."""
    with LatentWriter(tmp_path, LatentLayout((1, 2, 2), 3, LatentType.FLOAT32)) as writer:
        for i in range(6):
            writer.add(torch.zeros(1, 2, 2), i % 3)
    argv = ["data", "info", f"latents:{tmp_path}"]
    assert main([*argv, "--verify"]) == 0
    assert "every file can be read" in capsys.readouterr().out
    edits = {"label": {1: 99, 4: -1}, "latent": {2: float("nan"), 3: float("inf")}}
    content = unsealed_record(tmp_path / "meta.json")
    content["shards"][0]["hashes"] = None
    for name, rows in edits.items():
        path = tmp_path / f"{name}-00000.npy"
        column = np.load(path)
        for row, value in rows.items():
            column.reshape(6, -1)[row, 0] = value
        np.save(path, column)
        content["shards"][0]["files"][name]["sha256"] = sha256_of(path)
    (tmp_path / "meta.json").write_text(json.dumps(content))
    assert main([*argv, "--verify"]) == 2
    err = capsys.readouterr().err
    assert "(4 faults)" in err
    for words in (
        "label-00000.npy: its sample 1 has the label 99, and those of 3 classes are 0 to 2",
        "label-00000.npy: its sample 4 has the label -1",
        "latent-00000.npy: its sample 2 holds NaN or infinite values",
        "latent-00000.npy: its sample 3 holds NaN or infinite values",
    ):
        assert words in err
    assert main(argv) == 2
    assert "has the label" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_write_latents_of_pixels(
    dtype: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "latents"
    argv = ["data", "write-latents", "--from", "digits8", "-o", str(folder), "--dtype", dtype]
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    assert main(argv) == 0
    assert torch.get_num_threads() == 1, "as a rank of training"
    torch.set_num_threads(before)
    written = LatentFolder(folder, verify=True)
    images, labels = load_digits("digits8")
    assert len(written) == len(images)
    assert [written.label(i) for i in range(50)] == labels[:50].tolist()
    tolerance = {"fp16": 1e-3, "bf16": 1e-2, "fp32": 0}[dtype]
    for i in (0, 1023, 1024, 1796):
        torch.testing.assert_close(
            written.image(i), torch.from_numpy(images[i]), rtol=0, atol=tolerance
        )
    assert main(argv) == 0
    assert "already complete" in capsys.readouterr().out
    assert main(["data", "info", f"latents:{folder}", "--verify"]) == 0
    other = [*argv[:-1], "fp16" if dtype != "fp16" else "fp32"]
    assert main(other) == 2, "the same folder with another type"
    there = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[dtype]
    assert f"dtype: there '{there}', now 'float" in capsys.readouterr().err


def test_write_latents_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data", "write-latents", "--from", "digits8", "--shard-size", "500", "-o"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main([*argv, str(whole)]) == 0
    with monkeypatch.context() as patch:
        add = LatentWriter.add
        calls = iter(range(1200))

        def failing_add(self: LatentWriter, *sample: object) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            add(self, *sample)  # type: ignore[arg-type]

        patch.setattr(LatentWriter, "add", failing_add)
        assert main([*argv, str(resumed)]) == 130
    assert main(["data", "info", f"latents:{resumed}"]) == 2
    assert "incomplete: 1000 samples" in capsys.readouterr().err
    assert main([*argv, str(resumed)]) == 0
    assert "resuming after 1000 of 1797" in capsys.readouterr().out
    for file in whole.iterdir():
        assert (resumed / file.name).read_bytes() == file.read_bytes()


def as_rank(rank: int, num_ranks: int, argv: list[str]) -> int:
    """The command's status, as torchrun starts it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", num_ranks), ("LOCAL_RANK", rank)):
            patch.setenv(name, str(value))
        return main(argv)


def test_write_latents_on_ranks_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_pulse.cli.models import encode_dataset

    argv = ["data", "write-latents", "--from", "digits8", "--shard-size", "250", "-o"]
    whole, together, apart = (tmp_path / name for name in ("whole", "together", "apart"))
    assert main([*argv, str(whole)]) == 0
    assert run_ranks(3, main, [*argv, str(together)]) == [0, 0, 0]

    capsys.readouterr()
    to = [*argv, str(apart)]
    assert as_rank(1, 3, to) == 0
    assert "rank 1 has written its share; 547 of 1797 samples" in capsys.readouterr().out
    assert main(["data", "info", f"latents:{apart}"]) == 2
    assert "incomplete: 547 samples" in capsys.readouterr().err
    told = apart / "shard-00004.json"
    told.write_text(told.read_text()[:40])  # as of a rank that was killed, or another folder's
    other = unsealed_record(apart / "shard-00007.json")
    (apart / "shard-00006.json").write_text(json.dumps(other | {"of": "x", "number": 6}))
    monkeypatch.setattr(encode_dataset, "_LOG_S", 0.0)
    monkeypatch.setattr(encode_dataset, "_ASIDE_S", 0.0)
    assert as_rank(1, 2, to) == 0 and not capsys.readouterr().err
    assert as_rank(0, 4, to) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("encoding: 813 of 1797 images, ") and "left" in lines[0]
    assert lines[-1].startswith("encoding: 1297 of 1797 images, ")
    assert main([*to, "--dtype", "fp32"]) == 2 and "dtype" in capsys.readouterr().err
    assert main(to) == 0
    said = capsys.readouterr().out
    assert "resuming after 1297 of 1797" in said and "train on them" in said
    expected = {file.name: file.read_bytes() for file in whole.iterdir()}
    for folder in (together, apart):
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == expected
    with pytest.raises(SystemExit):
        as_rank(1, 2, [*argv, str(tmp_path / "no"), "--batch-size", "0"])
    assert not capsys.readouterr().err, "rank 0 says it"


def test_rank_of_job_reads_torchrun_and_srun() -> None:
    assert RankOfJob.of({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == RankOfJob(5, 8, 1)
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert RankOfJob.of(script) == RankOfJob.of({}) == RankOfJob()
    step = {**script, "SLURM_PROCID": "6", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "2"}
    assert RankOfJob.of(step) == RankOfJob(6, 8, 2)


def make_vae(folder: Path, **settings: Any) -> Any:
    """A tiny autoencoder of diffusers, saved."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    small = {"latent_channels": 2, "norm_num_groups": 4, "block_out_channels": (8,)}
    vae = AutoencoderKL(**{**small, **settings})
    vae.save_pretrained(folder)
    return vae


def test_write_latents_with_a_vae(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vae = make_vae(
        tmp_path / "vae", in_channels=1, out_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    folder = tmp_path / "latents"
    argv = ["data", "write-latents", "--from", "digits8", "--vae", str(tmp_path / "vae")]
    assert main([*argv, "-o", str(folder), "--dtype", "fp32"]) == 0
    written = LatentFolder(folder)
    assert written.image_shape == (2, 4, 4)
    images, _ = load_digits("digits8")
    with torch.no_grad():
        expected = vae.encode(torch.from_numpy(images[:1])).latent_dist.mean[0] * 0.5
    torch.testing.assert_close(written.image(0), expected, rtol=1e-4, atol=1e-5)
    back = Autoencoder(tmp_path / "vae").decode(written.image(0)[None])
    with torch.no_grad():
        decoded = vae.decode(expected[None] / 0.5).sample.clamp(-1, 1)
    torch.testing.assert_close(back, decoded, rtol=1e-3, atol=1e-4)
    odd = [*argv, "--image-size", "9", "-o", str(tmp_path / "odd")]
    assert main(odd) == 2
    assert "multiple of 2" in capsys.readouterr().err
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize(
    ("settings", "scale", "shift"),
    [
        ({"scaling_factor": 0.5}, [0.5, 0.5], [0.0, 0.0]),
        ({"scaling_factor": 0.5, "shift_factor": 0.25}, [0.5, 0.5], [0.25, 0.25]),
        (
            {"scaling_factor": 0.5, "latents_mean": [-1.5, 2.0], "latents_std": [8.0, 0.25]},
            [0.5 / 8, 0.5 / 0.25],
            [-1.5, 2.0],
        ),
    ],
    ids=["scale", "shift", "by channel"],
)
def test_latents_are_normalized_as_pipelines_do(
    tmp_path: Path, settings: dict[str, object], scale: list[float], shift: list[float]
) -> None:
    """As StableDiffusionXLPipeline and ...Img2ImgPipeline do with mean and std, and
    StableDiffusion3Pipeline with the shift."""
    vae = make_vae(tmp_path / "vae", **settings)
    ours, images = Autoencoder(tmp_path / "vae"), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        means = vae.encode(images).latent_dist.mode()
    wanted = (means - torch.tensor(shift).view(2, 1, 1)) * torch.tensor(scale).view(2, 1, 1)
    torch.testing.assert_close(ours.encode(images), wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        decoded = vae.decode(means).sample.clamp(-1, 1)
    torch.testing.assert_close(ours.decode(wanted), decoded, rtol=1e-3, atol=1e-3)


def test_vae_with_contradictory_normalizations_is_refused(tmp_path: Path) -> None:
    make_vae(tmp_path, shift_factor=0.5, latents_mean=[1.0, 2.0, 3.0])
    with pytest.raises(AutoencoderError) as caught:
        Autoencoder(tmp_path)
    for words in ("each of 2 channels", "latents_mean is given alone", "exclude each other"):
        assert words in str(caught.value)
    make_vae(tmp_path / "vae", scaling_factor=None)
    with pytest.raises(AutoencoderError, match="scaling_factor.*must be finite numbers"):
        Autoencoder(tmp_path / "vae")


def test_latents_that_fp16_cannot_hold_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_vae(tmp_path / "vae", in_channels=1, out_channels=1, scaling_factor=1e8)
    argv = ["data", "write-latents", "--from", "digits8", "--vae", str(tmp_path / "vae"), "-o"]
    assert main([*argv, str(tmp_path / "half")]) == 2
    said = capsys.readouterr().err
    assert "sample 0" in said and "the largest float16, 65504" in said and "--dtype bf16" in said
    assert main([*argv, str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    assert LatentFolder(tmp_path / "bf16").image(0).isfinite().all()
