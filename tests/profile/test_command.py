"""``pulse profile``: profiles that planning can use, and refusals that list everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.profile.files import load_profile
from megatron_pulse.profile.profile import Source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_measured_profile_plans(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["profile", "--backbone", "uvit-tiny", "--device", "cpu", "--micro-batch-size", "1,4"]
    assert main([*argv, "--once-per-kind", "--top", "3", "-o", "p.json"]) == 0
    out = capsys.readouterr().out
    assert "measured on CPU" in out and "and 9 layers more" in out and "weight grad" in out
    assert "written to p.json" in out
    profile = load_profile("p.json")
    assert profile.source is Source.MEASURED and profile.dtype == "float32"
    assert profile.micro_batch_sizes == (1, 4)
    costs = profile.at(3)
    partition = find_partition(costs, fold(2), Goal(collocate=True))
    for skip in costs.skips:
        ends = {partition.device_of_layer(skip.source), partition.device_of_layer(skip.destination)}
        assert len(ends) == 1


def test_an_analytic_profile_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["profile", "--backbone", "uvit-tiny", "--option", "depth=6", "--recompute"]
    assert (
        main([*argv, "--preset", "Ascend-910A-32GB", "--micro-batch-size", "2", "-o", "p.json"])
        == 0
    )
    out = capsys.readouterr().out
    assert "analytic on Ascend-910A-32GB, float16" in out and "with recomputation" in out
    profile = load_profile("p.json")
    assert profile.backbone["options"]["depth"] == 6 and len(profile.skips) == 3
    assert profile.recompute and profile.memory_bytes == 32 * 10**9


def test_a_table_on_a_device_in_figures(here: Path) -> None:
    row = {"params": 1, "flops_fwd": 1, "flops_bwd": 2, "saved_act_bytes": 4, "out_numel": 2}
    units = [{"name": name, **row} for name in "ab"]
    (here / "t.json").write_text(json.dumps({"units": units, "skips": []}))
    figures = ["--peak-tflops", "1", "--bandwidth-gbs", "2", "--memory-gb", "3"]
    assert main(["profile", "--from-table", "t.json", *figures, "-o", "p.json"]) == 0
    profile = load_profile("p.json")
    assert (profile.source, profile.dtype) == (Source.TABLE, "bfloat16")
    assert profile.micro_batch_sizes == (1, 2, 4)
    assert profile.device == "1 TFLOP/s, 2 GB/s, 3 GB"


CASES = {
    "everything": (
        "--backbone uvit-xxl --option a --micro-batch-size 0,x --preset V100-32GB --efficiency 2 "
        "--dtype bfloat16 --peak-tflops 0 --once-per-kind --top 0 -o p.txt",
        [
            "11 faults",
            "'uvit-xxl'",
            "--option a: write it as KEY=VALUE",
            "--micro-batch-size 0,x",
            "no peak of V100-32GB is known",
            "at most 1",
            "give either --preset or",
            "needs all of",
            "--peak-tflops is 0; it must be above 0",
            "only for measured profiles",
            "--top is 0",
            "must end in .json",
        ],
    ),
    "preset": ("--backbone uvit-tiny --preset TPU -o p.json", ["'TPU'", "A100-80GB"]),
    "nothing to run": (
        "--from-table t.json --option a=1 --device cpu -o p.json",
        ["4 faults", "no such file", "--option is for", "none to run", "name a device"],
    ),
    "figures of a real device": (
        "--backbone uvit-tiny --device cpu --preset H100 --efficiency 0.3 -o p.json",
        ["2 faults", "are for --device analytic"],
    ),
    "option": ("--backbone uvit-tiny --option depth=3 --preset H100 -o p.json", ["depth: must be"]),
    "sizes": (
        "--backbone uvit-tiny --option embed_dim=4000000 --device cpu -o p.json",
        [
            "bytes of memory; of uvit-tiny do not fit (10 faults)",
            "in_blocks.0.mlp: weights and their gradients are 1,024,0",
        ],
    ),
    "dtype": (
        "--backbone uvit-tiny --preset Ascend-910A-32GB --dtype float32 -o p.json",
        ["float16"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, expected = CASES[case]
    assert main(["profile", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pulse profile: error: ")
    for text in expected:
        assert text in err
    assert not list(here.iterdir())
