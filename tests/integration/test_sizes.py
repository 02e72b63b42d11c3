"""Published weights trained and drawn at another size: as diffusers runs what is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.sampling import load_model
from tests.integration.runs import BASE
from tests.integration.test_throughput import timed_run
from tests.ranks import run_ranks

DIT = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 10,
}
FLAGS = [
    "--pulse-backbone", "dit-tiny", "--pulse-objective", "epsilon",
    "--pulse-option", "in_channels=1", "--pulse-option", "out_channels=1",
    "--pulse-option", "sample_size=8",
    "--global-batch-size", "2", "--train-iters", "1", "--save-interval", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DiT of 16 x 16, imported and trained for a step at 8 x 8."""
    from diffusers import DiTTransformer2DModel

    folder = tmp_path_factory.mktemp("sizes")
    torch.manual_seed(0)
    DiTTransformer2DModel(**DIT).save_pretrained(folder / "published")
    source = ["--from", str(folder / "published")]
    source += ["--objective", "epsilon", "--noise-schedule", "linear"]
    assert main(["import", *source, "--to", str(folder / "imported")]) == 0
    load = ["--load", str(folder / "imported"), "--save", str(folder / "trained")]
    ((said, _),) = run_ranks(1, timed_run, [*FLAGS, *BASE, *load])
    change = "sample_size 16 there, 8 here: positions are computed at 8x8, with the spacing of 16"
    assert f"{folder / 'imported'}" in said and change in said
    return folder


def test_what_is_exported_is_the_same_function_in_diffusers(trained: Path) -> None:
    """Spaced for 16, computed at 8; a DiT made for 8 would be another function."""
    from diffusers import DiTTransformer2DModel

    options = read_saved_run(trained / "trained").record["options"]
    assert (options["sample_size"], options["base_sample_size"]) == (8, 16)
    target = str(trained / "exported")
    assert main(["export", "--load", str(trained / "trained"), "--raw", "--to", target]) == 0
    exported = DiTTransformer2DModel.from_pretrained(target).eval()
    assert exported.config.sample_size == 16
    model = load_model(trained / "trained", averaged=False)
    images, times = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 900.0])
    labels = torch.tensor([1, 9])
    ours = model.predict(images, times, {"labels": labels})
    made_for_8 = DiTTransformer2DModel(**{**DIT, "sample_size": 8}).eval()
    made_for_8.load_state_dict(exported.state_dict())
    with torch.no_grad():
        theirs, other = (
            m(images, timestep=times, class_labels=labels).sample for m in (exported, made_for_8)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, other, rtol=1e-2, atol=1e-2)


def test_samples_of_another_size(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, report = tmp_path / "grid.png", tmp_path / "report.json"
    argv = ["sample", "--load", str(trained / "trained"), "--raw", "-o", str(picture)]
    argv += ["--steps", "2", "--classes", "3", "--per-class", "1"]
    size = ["--option", "sample_size=64", "--json", str(report)]
    assert main([*argv, *size]) == 0
    said = "sample_size 8 there, 64 here: positions are computed at 64x64, with the spacing of 16"
    assert said in capsys.readouterr().err
    assert Image.open(picture).width == 64 + 4
    assert json.loads(report.read_text())["options"] == {"sample_size": "64"}
    assert main([*argv, "--height", "8", "--width", "80", "--option", "sample_size=16"]) == 2
    assert "--option sample_size and --height, --width give the same" in capsys.readouterr().err
    assert main([*argv, "--height", "8", "--vae", "x"]) == 2
    assert "--height and --width are given together" in capsys.readouterr().err
    assert main([*argv, "--height", "8", "--width", "80"]) == 0
    assert "samples are of 8x80" in capsys.readouterr().err
    assert Image.open(picture).width == 80 + 4 > Image.open(picture).height
    assert main([*argv, "--option", "num_layers=3", "--option", "base_sample_size=8"]) == 2
    error = capsys.readouterr().err
    assert "num_layers 2 there, 3 here" in error and "base_sample_size 16 there, 8 here" in error
    assert main([*argv, "--option", "sample_size=9", "--option", "depth"]) == 2
    assert "--option depth: write it as KEY=VALUE" in capsys.readouterr().err
    assert main([*argv, "--option", "sample_size=9"]) == 2
    assert "sample_size: must be divisible by patch_size=2, is 9" in capsys.readouterr().err
