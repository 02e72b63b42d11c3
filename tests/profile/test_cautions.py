"""Warnings about predictions from a profile."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import DeviceFigures
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.trace.compare import cost_cautions, mismatches
from megatron_pulse.planner.trace.trace import Trace, load_trace, save_trace
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from megatron_pulse.processes import RANKS_FOLDER
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.profile import Profile, Source
from megatron_pulse.profile.roofline import custom_device
from megatron_pulse.profile.warnings import (
    device_caution,
    plan_cautions,
    plan_thread_caution,
    rank_threads,
    spread_caution,
    thread_caution,
)
from tests.plans import MICRO_BATCH, small_plan, small_profile, trace_of
from tests.reference import unsealed_record


def disturbed() -> Profile:
    """Two of the measurements at one sample took unlike times; measured with two threads."""
    profile = small_profile()
    rows = list(profile.times[1])
    for i, spread in ((3, 0.4), (5, 0.9)):
        rows[i] = replace(rows[i], weight_grad_spread_s=spread * rows[i].whole_s)
    return replace(profile, times={**profile.times, 1: tuple(rows)}, threads=2)


def test_measurements_that_spread_are_named() -> None:
    profile = disturbed()
    assert [(size, name) for size, name, _ in profile.unsteady()] == [
        (1, profile.layers[5].name),
        (1, profile.layers[3].name),
    ]
    said = spread_caution(profile)
    count = 2 * len(profile.layers)
    assert said.startswith(f"2 of {count} measurements, ") and "over more than 30%" in said
    assert f"{profile.layers[5].name} at microbatch size 1, 90%" in said
    assert spread_caution(profile, 2) == "" == spread_caution(small_profile())
    assert spread_caution(replace(profile, source=Source.ANALYTIC)) == ""


@pytest.mark.parametrize(
    ("setting", "count"), [(None, 1), ("", 1), ("3", 3), ("4,2", 4), ("many", 1), ("0", 1)]
)
def test_threads_of_ranks(setting: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert rank_threads() == count
    assert thread_caution(count, count) == thread_caution(0, 1) == thread_caution(2, 0) == ""
    assert "with 2 thread(s), ranks run with 1" in thread_caution(2, 1)


def test_costs_of_another_device_than_the_cluster() -> None:
    profile = replace(small_profile(), device="V100-32GB", source=Source.ANALYTIC)
    assert device_caution(profile, "V100-32GB") == ""
    assert device_caution(replace(profile, device="a CPU"), "V100-32GB") == ""
    for device in ("H100", DeviceFigures(0.05, 16)):
        assert "costs are of V100-32GB" in device_caution(profile, device)
    measured = replace(profile, device="Tesla V100-SXM2-32GB", source=Source.MEASURED)
    for device in ("V100-32GB", "measured.json", DeviceFigures(0.05, 16)):
        assert device_caution(measured, device) == ""  # figures may be what was measured there
    figures = DeviceFigures(70.0, 320.0)
    other = replace(profile, device=custom_device(70.0, 1008.0, 24.0).name)
    assert "devices are 70 TFLOP/s, 320 GB/s" in device_caution(other, figures)
    same = replace(profile, device=custom_device(70.0, 320.0, 16.0).name)
    assert device_caution(same, figures) == ""
    assert "costs are of Tesla V100-SXM2-32GB" in device_caution(measured, "H100")
    assert "costs are of a CPU" in device_caution(replace(measured, device="a CPU"), "V100-32GB")


def test_profiles_of_before_there_were_threads_are_read(tmp_path: Path) -> None:
    save_profile(disturbed(), tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == disturbed()
    record = unsealed_record(tmp_path / "p.json")
    del record["threads"]
    (tmp_path / "p.json").write_text(json.dumps(record))
    assert load_profile(tmp_path / "p.json") == replace(disturbed(), threads=0)


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("setting", "flags", "threads"),
    [
        (None, [], "1"),
        ("many", [], "1"),
        ("4,2", [], "4,2"),
        ("4", ["--threads", "3"], "3"),
    ],
)
def test_ranks_have_as_many_threads_at_any_number(
    ranks: str,
    setting: str | None,
    flags: list[str],
    threads: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed.elastic.multiprocessing.api as processes
    from torch.distributed import run as torchrun

    script = tmp_path / "script.py"
    script.touch()
    handed: list[str] = []
    monkeypatch.setattr(torchrun, "run", lambda line: handed.append(os.environ["OMP_NUM_THREADS"]))
    # What the command changes for good in its own process.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    monkeypatch.setenv(RANKS_FOLDER, str(tmp_path))
    monkeypatch.setattr(processes, "_terminate_process_handler", None)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setenv("OMP_NUM_THREADS", setting or "")
    assert main(["run", *flags, "--nproc-per-node", ranks, str(script)]) == 0
    assert handed == [threads]


def test_tuning_says_it_and_plans_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    save_profile(disturbed(), "p.json")
    argv = ["tune", "--profile", "p.json", "--cluster", "cpu", "--global-batch-size", "8"]
    argv += ["--micro-batch-size", "1", "--seconds", "0.3", "--solver", "none", "-o", "plan.json"]
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert "warning: 2 of" in err and "warning: costs were measured with 2 thread(s)" in err
    kept = load_checked("plan.json").provenance
    assert len(plan_cautions(kept, 1)) == 2 and len(plan_cautions(kept, 2)) == 1
    assert "thread(s)" in plan_thread_caution(kept, 1) and not plan_thread_caution(kept, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(argv) == 0
    assert "thread" not in capsys.readouterr().err


def test_every_command_that_reads_a_profile_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    save_profile(disturbed(), path)
    for words in (["partition", "-p", "2"], ["schedule", "-p", "2", "-m", "4", "--name", "1f1b"]):
        assert main([words[0], "--profile", str(path), *words[1:]]) == 0
        assert "spread over more than 30%" in capsys.readouterr().err


def traced(**run: str) -> Trace:
    plan = small_plan()
    trace = trace_of(plan, [plan.simulate_step().timeline])
    ran = {"micro_batch_size": "2", "dtype": "float32", "recompute": "none", "threads": "1"}
    return replace(trace, machine={"device": "here"}, stages=plan.stages, run={**ran, **run})


def test_what_a_trace_is_not_of_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small_plan()
    assert mismatches(plan, traced()) == [] == cost_cautions(plan, traced())
    (fault,) = mismatches(plan, traced(dtype="bfloat16"))
    assert fault == "the traced run has dtype bfloat16, the plan has float32"
    faults = mismatches(plan, traced(micro_batch_size="8", recompute="all"))
    assert ["micro_batch_size 8" in faults[0], "recompute all" in faults[1]] == [True, True]
    first, second, *rest = plan.stages
    moved = replace(traced(), stages=((*first, second[0]), second[1:], *rest))
    assert "another plan: its stages have 6, 4" in mismatches(plan, moved)[0]
    save_plan(plan, tmp_path / "plan.json")
    save_trace(moved, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == moved
    assert main(["compare", str(tmp_path / "plan.json"), str(tmp_path / "trace.json")]) == 2
    assert "another plan" in capsys.readouterr().err


def test_what_makes_a_comparison_doubtful_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = small_plan().profile.times[MICRO_BATCH]
    wide = replace(first, forward_spread_s=0.5 * first.whole_s)
    costs = replace(small_plan().profile, times={MICRO_BATCH: (wide, *others)}, threads=4)
    plan = recomputed(replace(small_plan(), profile=costs))
    said = cost_cautions(plan, replace(traced(), machine={"device": "there"}))
    assert said[0].startswith("1 of 20 measurements") and "measured with 4 thread(s)" in said[1]
    assert said[2] == "the run was on there, but costs are measured, here"
    save_plan(plan, tmp_path / "plan.json")
    save_trace(traced(), tmp_path / "trace.json")
    assert main(["compare", str(tmp_path / "plan.json"), str(tmp_path / "trace.json")]) == 0
    out, err = capsys.readouterr()
    assert "warning: 1 of 20 measurements" in err and "warning: costs were measured with 4" in err
    assert "makespan" in out


def test_a_process_alone_computes_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_pulse.profile.measurement.machine import compute_as_a_rank

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    compute_as_a_rank()
    obeyed = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    compute_as_a_rank()
    alone = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (obeyed, alone) == (3, 1)


def test_measuring_uses_the_threads_that_are_asked_for() -> None:
    import torch

    from megatron_pulse.cli.import_megatron import prepare_megatron
    from megatron_pulse.profile.measurement.clock import RepetitionLimits
    from model_specs import load_backbone

    prepare_megatron()
    from megatron_pulse.profile.measurement.measure import measure

    before = torch.get_num_threads()
    backbone = load_backbone("example-tiny")
    patience = RepetitionLimits(1, 1, 0.0)
    for threads in (1, 2):
        profile = measure(backbone, [1], patience=patience, threads=threads)
        assert profile.threads == threads and f"{threads} thread" in profile.device
        assert torch.get_num_threads() == before
