"""``pulse sample`` and ``pulse curve`` on a tiny run that two ranks trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.sample_decoder import SampleDecoder
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.integration.runs import TEXT, pipeline, run
from tests.ranks import RanksFailed, run_ranks, said_once
from tests.tracing.zoo.videos import wan


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fold over two ranks, two steps long, with averaged weights."""
    folder = tmp_path_factory.mktemp("run")
    run(
        2,
        *pipeline(2),
        *("--global-batch-size", "4", "--train-iters", "2", "--save-interval", "2"),
        *("--save", str(folder / "checkpoints"), "--tensorboard-dir", str(folder / "tb")),
        *("--tensorboard-log-interval", "1", "--eval-interval", "2"),
    )
    return folder


def sample(trained: Path, *more: str) -> int:
    """``pulse sample`` in two steps."""
    return main(["sample", "--load", str(trained / "checkpoints"), "--steps", "2", *more])


def test_sample_writes_sheet_and_report(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, report = tmp_path / "new" / "grid.png", tmp_path / "report.json"
    assert sample(
        trained, "-o", str(grid), "--classes", "3,5-7", "--per-class", "2",
        "--score", "digits8", "--json", str(report),
    ) == 0  # fmt: skip
    image = Image.open(grid)
    assert image.width == 2 * (8 * 7 + 2) + 2, "two columns of 8x8 enlarged to 56"
    assert 4 * 56 < image.height < 4 * 80, "a row for each of the four classes"
    content = json.loads(report.read_text())
    assert content["labels"] == [3, 3, 5, 5, 6, 6, 7, 7]
    assert content["score"]["num_images"] == 8
    assert content["process"] == "flow, shift 1, times logit_normal(0, 1), 1000 timesteps"
    assert "generated digits show the requested digit" in capsys.readouterr().out


def test_sample_writes_a_folder_of_pictures(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, flags = tmp_path / "new" / "digits", ["--classes", "3,5", "--per-class", "2", "--raw"]
    flags += ["--noise", "diffusers"]
    assert sample(trained, "-o", str(folder), *flags, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    files = [str(folder / f"{i:04d}.png") for i in range(4)]
    assert (content["files"], content["labels"]) == (files, [3, 3, 5, 5])
    assert (content["weights"], content["noise"]) == ("raw", "diffusers")
    assert content["sampler"] == "flow Euler"
    assert sorted(map(str, folder.iterdir())) == files
    tensors = tmp_path / "digits.safetensors"
    assert sample(trained, "-o", str(tensors), *flags) == 0
    assert "(raw weights; flow, " in capsys.readouterr().out
    samples = load_file(tensors)["samples"]
    assert samples.shape == (4, 1, 8, 8)
    for path, pixels in zip(files, samples, strict=True):
        picture = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
        expected = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().expand(3, 8, 8)
        assert torch.equal(picture, expected)
    assert sample(trained, "-o", str(folder), *flags) == 2
    assert f"{folder} exists and is not empty; name a new folder" in capsys.readouterr().err
    assert sample(trained, "-o", str(tmp_path / "b"), "--height", "8", "--width", "16") == 2
    assert "uvit-tiny has no option for a height and width (options of its size: image_size)" in (
        capsys.readouterr().err
    )
    assert sample(trained, "-o", str(tmp_path / "a.jpg"), *flags, "--seed", str(2**64)) == 2
    said = capsys.readouterr().err
    assert "must end in .png (a sheet), .gif or .mp4 (videos)" in said and "below 2^64" in said


def test_sample_writes_frames_of_videos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a class of diffusers, from data; what is no picture is refused before it is sampled."""
    module, _ = wan()
    module.save_pretrained(tmp_path / "wan")
    size = [f"--option={option}" for option in ("frames=3", "height=8", "width=8", "text_length=7")]
    weights = str(tmp_path / "wan" / "diffusion_pytorch_model.safetensors")
    source = ["import", "--from", weights, "--module", f"diffusers:{tmp_path / 'wan'}", *size]
    flow = ["--objective", "flow", "--flow-shift", "3", "--to", str(tmp_path / "start")]
    assert main([*source, *flow]) == 0
    layout = LatentLayout((4, 3, 8, 8), 1, LatentType.FLOAT32, {"context": FieldSpec((7, 16))})
    with LatentWriter(tmp_path / "latents", layout) as writer:
        for _ in range(20):
            writer.add(torch.randn(4, 3, 8, 8), 0, {"context": torch.randn(7, 16)})
        writer.close()
    draw = ["sample", "--load", str(tmp_path / "start"), "--raw", "--steps", "2", "--per-class"]
    draw += ["1", "--from-data", "2", "--data", f"latents:{tmp_path / 'latents'}"]
    capsys.readouterr()
    make_vae(tmp_path / "vae", latent_channels=4)
    vae = ["--vae", str(tmp_path / "vae")]
    assert main([*draw, "-o", str(tmp_path / "no.png")]) == 2
    said = capsys.readouterr().err
    assert "samples are latents of 4x3x8x8: decode them with --vae" in said
    assert "-o FILE.safetensors" in said
    assert main([*draw, *vae, "-o", str(tmp_path / "videos"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    expected = [[f"{tmp_path}/videos/000{i}/000{k}.png" for k in range(3)] for i in range(2)]
    assert files == expected
    side = Image.open(files[1][2]).width
    autoencoder, first = Autoencoder(tmp_path / "vae"), torch.randn(2, 3, 4, 8, 8)
    behind = SampleDecoder((4, 3, 8, 8), autoencoder)(first.transpose(1, 2))
    assert torch.equal(SampleDecoder((3, 4, 8, 8), autoencoder)(first), behind), (
        "as CogVideoX has frames"
    )
    assert main([*draw, *vae, "-o", str(tmp_path / "sheet.png")]) == 0
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.width == 3 * (side * -(-56 // side) + 2) + 2, "three frames in a row"
    assert sheet.height > 2 * 56


def test_sample_writes_tensors() -> None:
    assert (
        not SampleDecoder((3, 8, 8), None).faults()
        and not SampleDecoder((3, 9, 8, 8), None).faults()
    )
    for shape in ((3, 16), (1,), (3, 1, 2, 8, 8)):
        (said,) = SampleDecoder(shape, None).faults()
        assert "which is no picture and no video: write them with -o FILE.safetensors" in said


def test_sample_is_determined_by_the_seed(trained: Path, tmp_path: Path) -> None:
    def picture(name: str, *more: str) -> bytes:
        path = tmp_path / name
        assert sample(trained, "-o", str(path), "--classes", "1", "--per-class", "2", *more) == 0
        return path.read_bytes()

    first = picture("a.png")
    assert picture("b.png") == first
    assert picture("c.png", "--seed", "1") != first
    assert picture("d.png", "--raw", "--iteration", "2") != first


def test_sample_with_another_process(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What flags say is drawn with and reported; what does not go together is refused."""
    report = tmp_path / "report.json"
    pictures = set()
    for flags, expected in (
        ([], "flow, shift 1,"),
        (["--flow-shift", "3"], "flow, shift 3,"),
        (["--objective", "v"], "v, scaled_linear betas 0.00085 to 0.012,"),
        (["--objective", "v", "--zero-terminal-snr"], "zero terminal SNR"),
        (["--objective", "v", "--beta-end", "0.03"], "0.00085 to 0.03,"),
    ):
        path = tmp_path / f"{len(pictures)}.png"
        grid = ["-o", str(path), "--classes", "1", "--per-class", "2", "--json", str(report)]
        assert sample(trained, *grid, *flags) == 0
        assert expected in json.loads(report.read_text())["process"]
        assert expected in capsys.readouterr().out
        pictures.add(path.read_bytes())
    assert len(pictures) == 5
    assert sample(trained, "-o", str(tmp_path / "no.png"), "--beta-end", "0.03") == 2
    assert "flow has no noise schedule" in capsys.readouterr().err


def test_guidance_is_none_by_default_where_no_null_class_was_trained(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--global-batch-size", "4", "--train-iters", "1", "--pulse-class-dropout", "0"]
    run(1, *steps, "--save", str(tmp_path / "checkpoints"))

    def drawn(folder: Path, name: str, *more: str) -> tuple[float, str, str]:
        report = tmp_path / "report.json"
        files = ["-o", str(tmp_path / name), "--json", str(report), "--per-class", "1"]
        assert sample(folder, *files, "--classes", "1", *more) == 0
        said = capsys.readouterr()
        return json.loads(report.read_text())["guidance"], said.out, said.err

    capsys.readouterr()
    guidance, line, _ = drawn(tmp_path, "a.png")
    assert guidance == 1
    assert "; not guided: it was trained with --pulse-class-dropout 0, which trains no null" in line
    assert drawn(tmp_path, "b.png", "--guidance", "1")[0] == 1
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    guidance, line, warned = drawn(tmp_path, "c.png", "--guidance", "3")
    assert guidance == 3 and "not guided" not in line
    assert "starts from an untrained one; --guidance 1 samples without" in warned
    (tmp_path / "recipe.toml").touch()  # the run was started by a recipe
    warned = drawn(tmp_path, "d.png", "--guidance", "3")[2]
    assert "trained with training.dropout 0, which trains no null" in warned
    assert drawn(trained, "d.png")[0] == 2
    with pytest.raises(SystemExit):
        drawn(tmp_path, "e.png", "--eta", "1.5")
    assert "argument --eta: is 1.5; it must be from 0 to 1" in capsys.readouterr().err


def test_guidance_of_an_unconditional_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options without an effect on a model are refused if given, and null in the report."""
    small = ["--pulse-option", "depth=1", "--pulse-option", "image_size=8"]
    steps = ["--global-batch-size", "4", "--train-iters", "1", "--pulse-objective", "v"]
    backbone = ["--pulse-backbone", "example-tiny", *small]
    run(1, *backbone, *steps, "--save", str(tmp_path / "checkpoints"), backbone="none")
    files = ["-o", str(tmp_path / "a.png"), "--per-class", "1"]
    capsys.readouterr()
    assert sample(tmp_path, *files, "--guidance", "5", "--json") == 2
    said = capsys.readouterr().err
    assert "--guidance 5: example-tiny is unconditional, so there is nothing to guide" in said
    assert not (tmp_path / "a.png").exists()
    for flags in ([], ["--guidance", "1"]):
        assert sample(tmp_path, *files, *flags, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert [report[name] for name in ("guidance", "eta", "flow_grid")] == [None, 0, None]
    assert sample(tmp_path, *files) == 0
    assert "2 steps; not guided: example-tiny is unconditional)" in capsys.readouterr().out


def test_sample_refuses_what_the_checkpoint_lacks(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.png"
    assert sample(trained, "-o", str(grid), "--classes", "8-12") == 2
    assert "the model has classes 0-9, not 10, 11, 12" in capsys.readouterr().err
    assert sample(trained, "-o", str(grid), "--iteration", "7") == 2
    assert "iter_0000007 is not a complete" in capsys.readouterr().err
    assert sample(trained, "-o", str(grid), "--steps", "2000", "--eta", "0.5") == 2
    said = capsys.readouterr().err
    assert "--steps is 2,000; it must be from 1 to 1,000, the timesteps of the model's pro" in said
    assert "--eta is DDIM's, and the model's process is flow" in said
    assert sample(trained, "-o", str(grid), "--objective", "v", "--flow-grid", "scheduler") == 2
    assert (
        "--flow-grid scheduler is flow's, and the model's process is v" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-conditional UNet that two ranks trained on captioned digits for two steps."""
    folder = tmp_path_factory.mktemp("texts")
    run(
        2,
        *pipeline(2, *TEXT, "--pulse-data", captioned_digits(folder)),
        *("--global-batch-size", "4", "--train-iters", "2", "--save-interval", "2"),
        *("--save", str(folder / "checkpoints")),
        backbone="unet",
    )
    return folder


def test_sample_draws_prompts(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def picture(name: str, *more: str) -> bytes:
        flags = ["-o", str(tmp_path / name), "--per-class", "2", "--raw", *more]
        assert sample(texts, *flags) == 0
        return (tmp_path / name).read_bytes()

    report = tmp_path / "report.json"
    two = ["--prompt", "digit seven", "--prompt", "a dark digit"]
    first = picture("a.png", *two, "--json", str(report))
    assert json.loads(report.read_text())["prompts"] == ["digit seven"] * 2 + ["a dark digit"] * 2
    image = Image.open(tmp_path / "a.png")
    assert image.width == 2 * (8 * 7 + 2) + 2 and 2 * 56 < image.height < 2 * 80
    assert picture("b.png", *two) == first
    assert picture("c.png", *two, "--guidance", "1") != first
    assert "too long" not in capsys.readouterr().err
    assert picture("d.png", "--prompt", "digit seven", "--prompt", "a dark thing") != first
    picture("e.png", "--prompt", "a dark digit seven here", "--prompt", "a dark digit seven in it")
    said = [line for line in capsys.readouterr().err.splitlines() if "too long" in line]
    assert said == [
        "warning: 'a dark digit seven in it' is 1 word too long: its end does not count"
    ]


def test_sample_takes_conditioning_of_the_data(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.png"
    flags = ["-o", str(grid), "--per-class", "1", "--raw", "--from-data"]
    assert sample(texts, *flags, "4") == 0
    assert Image.open(grid).height > 4 * 56
    grid.unlink()
    assert sample(texts, *flags, "5") == 2
    assert "the data has 4 validation samples" in capsys.readouterr().err
    argv = ["data", "write-latents", "--from", f"captions:{texts / 'captions'}"]
    argv += ["--image-size", "8", "--channels", "1", "--text-states", "6x16"]
    assert main([*argv, "-o", str(tmp_path / "latents")]) == 0
    assert "exceed" not in capsys.readouterr().err
    short = [*argv[:-1], "3x16", "-o", str(tmp_path / "short")]
    assert main(short) == 0
    assert "of the first 40 captions 40 exceed the text length" in capsys.readouterr().err
    assert sample(texts, *flags, "2", "--data", f"latents:{tmp_path / 'latents'}") == 0
    assert sample(texts, *flags, "2", "--data", "digits8") == 2
    assert "reads context (6x16 float32), the data has none" in capsys.readouterr().err


def test_sample_refuses_texts_it_cannot_encode(
    texts: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["-o", str(tmp_path / "grid.png")]
    assert sample(texts, *grid) == 2
    assert "reads context. Give --prompt" in capsys.readouterr().err
    assert sample(texts, *grid, "--classes", "1") == 2
    assert "has no classes" in capsys.readouterr().err
    assert sample(trained, *grid, "--prompt", "seven") == 2
    assert "trained on digits8 without captions" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["sample", "export"])
def test_sample_refuses_damaged_weights(
    command: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage that leaves all sizes as they are, in a file that is read for weights alone."""
    damaged, out = tmp_path / "damaged", tmp_path / "out.pth"
    shutil.copytree(trained / "checkpoints", damaged)
    file = damaged / "iter_0000002" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    to = ["-o", str(out.with_suffix(".png"))] if command == "sample" else ["--to", str(out)]
    assert main([command, "--load", str(damaged), *to]) == 2
    err = capsys.readouterr().err
    assert "iter_0000002 is damaged: __1_0.distcp: content differs from what was saved" in err
    assert "no other step there is intact" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [damaged]
    with pytest.raises(SystemExit, match="2"):
        main(["export", "--load", str(damaged), "--to", str(out), "--iteration", "-1"])
    assert "--iteration" in (err := capsys.readouterr().err) and "latest" not in err


def test_curve_draws_losses(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "loss.png"
    argv = ["curve", "--tensorboard-dir", str(trained / "tb"), "-o", str(picture), "--json"]
    assert main(argv) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["training"]["steps"] == [1, 2]
    assert values["validation"]["steps"][-1] == 2
    assert Image.open(picture).width > 500


def sample_on_a_rank(argv: list[str]) -> int:
    """``pulse sample`` as one of several ranks; the number of parameters that it holds."""
    from megatron_pulse.integration.pipeline_sampling import SamplingJob

    held, stages = 0, SamplingJob._stages

    def count(self: SamplingJob, plan: Any, **kwargs: Any) -> Any:
        nonlocal held
        own = stages(self, plan, **kwargs)
        held = sum(p.numel() for stage in own for p in stage.parameters())
        return own

    SamplingJob._stages = count  # type: ignore[method-assign]
    assert main(argv) == 0
    return held


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_a_model_and_draw_the_samples_of_one(
    num_ranks: int, trained: Path, tmp_path: Path
) -> None:
    def argv(name: str, *more: str) -> list[str]:
        flags = ["--load", str(trained / "checkpoints"), "--steps", "3", "--classes", "3,5,7"]
        size = ["--per-class", "2", "--batch-size", "4", "--guidance", "1.5"]
        return ["sample", *flags, *size, "-o", str(tmp_path / name), *more]

    assert main(argv("one.safetensors")) == 0
    held = run_ranks(num_ranks, sample_on_a_rank, argv("several.safetensors"))
    one, several = (
        load_file(tmp_path / f"{name}.safetensors")["samples"] for name in ("one", "several")
    )
    assert float((one - several).abs().max() / one.abs().max()) <= 2e-7
    assert max(held) < 0.8 * sum(held), "no rank holds the model"
    with pytest.raises(RanksFailed) as failed:
        run_ranks(num_ranks, sample_on_a_rank, argv("a.safetensors", "--classes", "10"))
    assert said_once(failed.value, "the model has classes 0-9, not 10")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(num_ranks, sample_on_a_rank, argv("a.safetensors", "--iteration", "7"))
    assert said_once(failed.value, "iter_0000007 is not a complete")
