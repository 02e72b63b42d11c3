"""Whole Megatron runs with FSDP2 whose ranks share tokens: numbers, checkpoints, plans."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import save_cluster
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.census import Call, census
from tests.integration.runs import BASE, STEPS, Run, alone, pipeline, run
from tests.integration.test_context_parallel import RINGS, assert_close
from tests.integration.test_families import FAMILIES, flags_of
from tests.integration.test_fsdp import FSDP, ONCE
from tests.planner.tune.problems import cluster
from tests.ranks import run_ranks
from tests.reference import unsealed_record

TWO = ["--context-parallel-size", "2"]
HSDP = ["--pulse-fsdp-group", "2"]
"""Ranks that share tokens share the weights too; other replicas have copies."""


@pytest.mark.parametrize(
    ("backbone", "num_ranks", "flags", "common"),
    [
        ("tokens", 2, [], []),
        ("tokens", 4, [*ONCE, "--pulse-fsdp-layers", "3"], ["--optimizer", "sgd"]),
        ("tokens", 4, [*HSDP, "--recompute-granularity", "full"], RINGS["tokens"]),
        ("tokens", 2, [], ["--pulse-adapter", "lora", "--pulse-adapter-target", "into"]),
        ("uvit", 4, ["--recompute-granularity", "selective"], []),
        ("uvit", 4, [*HSDP, *ONCE], RINGS["uvit"]),
    ],
    ids=["module", "replicas", "hsdp", "lora", "family", "rings"],
)
def test_a_run_equals_one_process(
    backbone: str, num_ranks: int, flags: list[str], common: list[str]
) -> None:
    got = run(num_ranks, *STEPS, *TWO, FSDP, *flags, *common, backbone=backbone)
    expected = alone(*STEPS, *common, backbone=backbone)
    assert got.weights.keys() == expected.weights.keys()
    assert_close(got, expected)


def test_checkpoints_cross_layouts(tmp_path: Path) -> None:
    """The optimizer's state and the EMA too: other ranks, a pipeline, copies, one process."""
    layouts = [
        (2, [FSDP, *TWO]),
        (4, [FSDP, *TWO, *HSDP]),
        (2, [*pipeline(2), "--use-distributed-optimizer"]),
        (4, [FSDP, "--context-parallel-size", "4"]),
        (1, ["--use-distributed-optimizer"]),
    ]
    batch = ["--global-batch-size", "8"]
    expected = alone(*batch, "--train-iters", str(len(layouts)), backbone="tokens")
    got: list[Run] = []
    for number, (num_ranks, flags) in enumerate(layouts):
        steps = ["--train-iters", str(number + 1), "--save", str(tmp_path), "--save-interval", "1"]
        got.append(run(num_ranks, *batch, *steps, *flags, backbone="tokens"))
    assert [one.losses[0] for one in got] == pytest.approx(expected.losses, rel=1e-6)
    assert [one.grad_norms[0] for one in got] == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, average in expected.averages.items():
        if not name.endswith("into.bias"):  # attention ignores those of keys
            torch.testing.assert_close(got[-1].averages[name], average, rtol=1e-3, atol=5e-5)


def test_a_transformer_of_several_sizes_trains_as_one(tmp_path: Path) -> None:
    """Its texts are divided too."""
    flags = flags_of(FAMILIES["sd3"], tmp_path)
    got = run(2, *flags, *TWO, FSDP, backbone="none")
    assert_close(got, run(1, *flags, backbone="none"))


def test_a_tuned_plan_is_checked_and_sends_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gathers, reduces and exchanges the bytes that it says."""
    save_cluster(cluster(1, 4, intra_gbs=500.0, memory_gb=0.0026), tmp_path / "c.yaml")
    plan = str(tmp_path / "plan.json")
    tune = ["tune", "--backbone", "uvit-tiny", "--option", "in_channels=1", "--dtype", "float32"]
    tune += ["--cluster", str(tmp_path / "c.yaml"), "--global-batch-size", "4"]
    tune += ["--pipeline", "1", "--tensor", "1", "--context-parallel", "2"]
    assert main([*tune, "--seconds", "1", "--solver", "none", "-o", plan]) == 0
    said = capsys.readouterr().out
    assert "K=2" in said and "FSDP2 over 4 ranks" in said
    assert main(["check", plan]) == 0 and main(["show", plan]) == 0
    said = capsys.readouterr().out
    assert "FSDP2 over 4 ranks: " in said and "all-to-alls of 2 ranks" in said
    made = load_checked(plan)
    assert made.fsdp is not None and (made.data, made.context) == (2, 2)
    flags = [*BASE[: BASE.index("--micro-batch-size")], *BASE[BASE.index("--lr") :]]
    flags += ["--pulse-plan", plan]
    calls = Counter[Call]()
    for of_rank in run_ranks(4, census, flags):
        calls += of_rank
    exchanged = sum(n * c.num_bytes for c, n in calls.items() if c.kind == "all-to-all") / 2
    assert exchanged == made.predicted["context_bytes_per_sample"] * made.global_batch_size
    shared = [
        (call, n) for call, n in calls.items() if call.kind in ("all-gather", "reduce-scatter")
    ]
    sent = sum(n * call.num_bytes * 3 / 4 for call, n in shared)
    said_bytes = made.predicted["data_bytes_per_sample"] * made.global_batch_size
    assert sent == pytest.approx(said_bytes, rel=0.05)
    record = unsealed_record(plan)
    record["fsdp"]["group"] = 3
    Path(plan).write_text(json.dumps(record))
    assert main(["check", plan]) == 2
    assert "3 does not divide the 4 replicas" in capsys.readouterr().err
