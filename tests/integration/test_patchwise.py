"""Patch-wise training in whole runs."""

from itertools import islice
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.data.patchwise import PatchwiseSampler
from tests.cli.test_data import make_vae
from tests.data.test_pairs import make_pictures
from tests.integration.runs import BASE, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

SEED = 11
PATCHES = ["--pulse-option", "patchwise=1/2:0.5", "--global-batch-size", "4", "--train-iters", "3"]


def test_fold_equals_one_process_on_patches_and_samples_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = {"consumed_samples": 0, "data_parallel_rank": 0, "data_parallel_size": 1}
    sampler = PatchwiseSampler(
        100, shares=(0.5, 0.5), group_size=4, micro_batch_size=4, seed=SEED, **order
    )
    assert {items[0][0] // 100 for items in islice(sampler, 3)} == {0, 1}
    flags = [*PATCHES, "--seed", str(SEED)]
    whole = run(1, *flags, "--save", str(tmp_path / "run"), backbone="unet")
    two = run(2, *flags, *pipeline(2), backbone="unet")
    assert two.executed.placement == "fold"
    assert_same(two, whole)
    command = ["sample", "--load", str(tmp_path / "run"), "-o", str(tmp_path / "a.png")]
    assert main([*command, "--steps", "1", "--per-class", "1"]) == 0
    assert "samples are 1x8x8" in capsys.readouterr().err


def test_autoencoder_in_the_loop_is_refused_beside_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vae(tmp_path / "encoders" / "vae", latent_channels=4)
    make_pictures(tmp_path / "photos", *(f"{i}.png" for i in range(9)))
    flags = ["--pulse-backbone", "dit-tiny", "--pulse-data", f"folder:{tmp_path / 'photos'}"]
    flags += ["--pulse-encoders", str(tmp_path / "encoders"), *PATCHES]
    (said,) = refuse(monkeypatch, 1, flags, BASE)
    assert "patchwise: the autoencoder runs in the loop" in said
    assert "pulse data write-latents" in said
