"""``pulse tune``: its table is the tuner's, plans can be read, and refusals say what to do."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.cli.plan.tuning.interruptible_clock import InterruptibleClock
from megatron_pulse.cli.plan.tuning.tune_summary import PREDICTION_ERROR
from megatron_pulse.planner.cluster.cluster import Cluster, save_cluster
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.files import save_profile
from tests.planner.tune.problems import cluster, profile

FAST = "--seconds 0.7 --solver none"
ASKED = "tune --profile p.json --cluster c.yaml --global-batch-size 16"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile and a cluster."""
    monkeypatch.chdir(tmp_path)
    save_profile(profile(random.Random(0), 12, 5), "p.json")
    save_cluster(cluster(1, 4), "c.yaml")
    return tmp_path


def test_tune_answers_first_and_writes_json_and_plan(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{ASKED} {FAST} --top 4 --explain --json t.json -o plan.json".split()) == 0
    text = capsys.readouterr().out
    record = json.loads((here / "t.json").read_text())
    outcomes = record["outcomes"]
    answer, listed = text.split("\n\n", 1)[0].splitlines(), text.split("\n\n")[1]
    names = [line.split()[0] for line in answer]
    assert names == ["plan", "predicted", "compared", "certainty", "train"]
    assert f"P={outcomes[0]['pipeline']} D={outcomes[0]['data']}" in answer[0]
    assert f"{outcomes[0]['samples_per_s']:.4g} samples/s, " in answer[1]
    assert " of 16 usable GB on the fullest device" in answer[1]
    against = "the best without it" if outcomes[0]["layout"] == "FSDP2" else "FSDP2"
    assert f" x {against} (" in answer[2] and "data parallelism" in answer[2]
    assert answer[3].endswith(PREDICTION_ERROR)
    assert "pulse run --nproc-per-node 4 " in answer[4] and "--pulse-plan plan.json" in answer[4]
    assert listed.split()[:3] == ["P", "D", "T"]
    assert 1 <= len(outcomes) <= 4
    assert [o["step_s"] for o in outcomes] == sorted(o["step_s"] for o in outcomes)
    best = outcomes[0]
    assert best["pipeline"] * best["data"] * best["tensor"] == 4
    assert best["num_microbatches"] * best["data"] * best["micro_batch_size"] == 16
    assert f"{best['samples_per_s']:.4g}" in text and "outcome of the " in text
    for part in (
        "schedule: ",
        "simulated configs: the fastest",
        f"all {record['num_configs']:,} ",
    ):
        assert part in text
    sure = record["certainty"]
    assert sure["schedule"]["gap"] == best["gap"] and not sure["schedule"]["extrapolated"]
    assert sure["schedule"]["proved"] == (best["gap"] < 1e-9)
    assert sure["among_simulated"]["num_simulated"] == record["num_simulated"] >= len(outcomes)
    assert sure["among_all"]["proved"] or sure["among_all"]["bound_s"] < best["step_s"]
    other = record["fsdp_baseline"]
    assert other["num_microbatches"] * other["micro_batch_size"] * 4 == 16
    assert other["samples_per_s"] <= 1.005 * best["samples_per_s"] and "ideal collectives" in text
    assert "why P=" in text and "on the mean device: compute " in text
    plan = load_checked(here / "plan.json")
    assert (plan.pipeline, plan.data, plan.tensor) == (
        best["pipeline"], best["data"], best["tensor"]
    )  # fmt: skip
    assert plan.num_microbatches == best["num_microbatches"] == plan.schedule.num_microbatches
    makespan = plan.simulate_step().timeline.makespan
    assert makespan == pytest.approx(best["pipeline_s"], rel=0.2 if plan.fsdp else 1e-6)
    assert plan.predicted["samples_per_s"] == pytest.approx(best["samples_per_s"])
    search = plan.provenance["search"]
    assert search["configs"] == record["num_configs"]
    assert 0 < search["lower_bound_s"] <= plan.predicted["step_s"] * (1 + 1e-9)
    assert main("show plan.json --layers".split()) == 0
    shown = capsys.readouterr().out
    assert f"  search    {search['configs']:,} configs, " in shown
    rows = [row for row in shown.splitlines() if re.match(r" +\d+  layer\d+ ", row)]
    ways = [number in plan.activations.selective for number in range(12)]
    assert ["selectively recomputed" in row for row in rows] == ways


def test_certainty_names_link_contention(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule is the shortest where messages do not wait for each other; here they do."""
    save_cluster(cluster(2, 2, inter_gbs=0.3), "slow.yaml")
    asked = f"{ASKED} {FAST} --pipeline 4 --micro-batch-size 2 --explain --json t.json"
    assert main(asked.replace("c.yaml", "slow.yaml").split()) == 0
    text, record = capsys.readouterr().out, json.loads((here / "t.json").read_text())
    sure, best = record["certainty"]["schedule"], record["outcomes"][0]
    assert not sure["extrapolated"] and sure["waiting_s"] > 0.01 * best["pipeline_s"]
    longer = best["pipeline_s"] / (best["pipeline_s"] - sure["waiting_s"]) - 1
    assert f"link contention makes the step {longer:.1%} longer" in text


@pytest.mark.parametrize(("size", "said"), [("16", True), ("2", False)])
def test_extrapolated_microbatch_sizes_are_noted(
    here: Path, capsys: pytest.CaptureFixture[str], size: str, said: bool
) -> None:
    asked = f"{ASKED} {FAST} --pipeline 2,4 --micro-batch-size {size}"
    assert main(f"{asked} --tensor 2,1 --json t.json".split()) == 0
    note = f"note: the profile is of microbatches of 1, 8; times at b = {size} are extrapolated"
    assert (note in capsys.readouterr().out) is said
    outcomes = json.loads((here / "t.json").read_text())["outcomes"]
    assert {outcome["costs_extrapolated"] for outcome in outcomes} == {said}


def interrupt_when_something_is_found() -> None:
    while not isinstance(
        until := getattr(signal.getsignal(signal.SIGINT), "__self__", None), InterruptibleClock
    ):
        time.sleep(0.01)
    while not until.found:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_search_reports_its_best(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    chain = profile(random.Random(0), 24, 9)
    save_profile(chain, "p.json")
    save_cluster(cluster(4, 8), "c.yaml")
    threading.Thread(target=interrupt_when_something_is_found, daemon=True).start()
    began = time.monotonic()
    asked = ASKED.replace("16", "256")
    assert main(f"{asked} --solver none --seconds 3000 --explain -o plan.json".split()) == 0
    took = time.monotonic() - began
    said = capsys.readouterr()
    assert "stopping with the best so far" in said.err and took < 100
    seconds = re.search(r"simulated, in ([\d.]+) s", said.out)
    assert seconds and float(seconds[1]) <= took
    load_checked(here / "plan.json")
    assert signal.getsignal(signal.SIGINT) is before


def test_second_or_early_interrupt_ends_the_command() -> None:
    until = InterruptibleClock(10.0)
    with until:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        until.found, before = True, until.clock()
        signal.raise_signal(signal.SIGINT)
        assert 10.0 <= until.clock() - before < 15.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_choices_restrict_the_search(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--layouts",
        "fold exact,sequential",
        "--no-recompute",
        "--no-split-backward",
        "--json",
    ]
    asked = f"{ASKED} {FAST} --pipeline 4 --tensor 1 --micro-batch-size 2"
    assert main([*asked.split(), *flags]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert {o["layout"] for o in outcomes} <= {"fold exact", "sequential"}
    assert {o["pipeline"] for o in outcomes} == {4}
    for outcome in outcomes:
        assert outcome["micro_batch_size"] == 2 and outcome["tensor"] == 1
        assert not outcome["activations"] and not outcome["split"]


def test_unused_choices_are_warned_of(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{ASKED} {FAST} --pipeline 2,7 --micro-batch-size 1,5".split()) == 0
    said = capsys.readouterr()
    assert "warning: --pipeline 7; --micro-batch-size 5: left out, no config of " in said.err
    assert "train  " in said.out and "(after -o plan.json)" in said.out
    assert "outcome of the" not in said.out and "in torch:" not in said.out


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (cluster(2, 2, inter_gbs=0.02), r"use 2 devices: \d.* times as fast as all 4 together \("),
        (cluster(memory_gb=2.0), r"^plan .*FSDP2 over 4 ranks.*\n.*\ncompared   1\.\d+ x the best"),
    ],
)
def test_answer_names_what_is_faster_and_what_does_not_fit(
    here: Path, capsys: pytest.CaptureFixture[str], where: Cluster, said: str
) -> None:
    save_cluster(where, "c.yaml")
    assert main(f"{ASKED} --seconds 1 --solver none --top 1".split()) == 0
    text = capsys.readouterr().out
    assert re.search(said, text), text


def test_prediction_error_is_that_of_the_benchmarks() -> None:
    page = Path(__file__).parents[1] / "benchmarks/README.md"
    assert f"| predicted against measured steps | {PREDICTION_ERROR} |" in page.read_text()


def test_tune_lists_all_faults_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layouts", "flod,sequential", "--pipeline", "2,x", "--seconds", "0", "--top", "0"]
    flags += ["--no-offload", "--optimizer-cpu-offload"]
    asked = f"{ASKED} --option a=1 --dtype float16 -o plan.txt".replace("p.json", "none.json")
    asked = asked.replace("c.yaml", "none.yaml")
    assert main([*asked.split(), *flags]) == 2
    error = capsys.readouterr().err
    for part in (
        "10 faults",
        "none.yaml",
        "--no-offload and --optimizer-cpu-offload exclude",
        "--layouts: no layout is called 'flod'; ",
        "--pipeline 2,x",
        "--seconds is 0",
        "--top is 0",
        "none.json: there is no such file",
        "--option is for --backbone",
        "--dtype is for --backbone",
        "must end in .json",
    ):
        assert part in error
    assert sorted(p.name for p in here.iterdir()) == ["c.yaml", "p.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--cluster nowhere", "no cluster is called 'nowhere'"),
        ("--cluster dgx-a100:x", "behind the colon goes a number of nodes"),
        (
            "--tensor 3",
            "3: none divides both the 4 devices and the 4 of a node. Possible: 1, 2, 4",
        ),
        ("--pipeline 3", "pipeline degree 3: none divides 4 devices with tensor degree 1, 2"),
        ("--pipeline 4 --tensor 2", "with tensor degree 2. Possible: 1, 2"),
        ("--layouts", "layouts one device: none is possible with pipeline degree 2, 4"),
        (
            "--global-batch-size 15 --tensor 1 --pipeline 2",
            "global batch size 15: not a multiple of any possible number of replicas (2)",
        ),
        ("--micro-batch-size 3", "microbatch size 3: none divides a replica's samples"),
    ],
)
def test_tune_refuses_impossible_choices(
    here: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    more = (
        ["--layouts", "one device", "--pipeline", "2,4"] if flags == "--layouts" else flags.split()
    )
    assert main([*ASKED.split(), *more, *FAST.split()]) == 2
    assert said in capsys.readouterr().err


def test_impossible_choices_are_refused_before_profiling(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers are counted for seconds, and need torch."""
    asked = "tune --backbone uvit-2.7b --cluster dgx-a100 --global-batch-size 16 --pipeline 3"
    began = time.process_time()
    assert main(asked.split()) == 2
    assert "pipeline degree 3: none divides 8 devices" in capsys.readouterr().err
    assert main(f"{asked} --world-sizes 4,8 -o plans".split()) == 2
    assert "pipeline degree 3: none divides 8 devices" in capsys.readouterr().err
    assert time.process_time() - began < 2 and not (here / "plans").exists()


def test_optimizer_offload_is_predicted_and_planned(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"{ASKED} {FAST} --optimizer-cpu-offload -o plan.json"
    assert main(asked.split()) == 2
    assert "Write links.host into its file" in capsys.readouterr().err
    save_cluster(cluster(host_gbs=12.0), "c.yaml")
    assert main(asked.split()) == 0
    assert load_checked(here / "plan.json").optimizer_cpu_offload
    assert main(["show", "plan.json"]) == 0
    assert "of host memory per device" in capsys.readouterr().out


def test_state_of_another_optimizer_is_planned_and_never_sharded(here: Path) -> None:
    assert main(f"{ASKED} {FAST} --optimizer sgd -o plan.json".split()) == 0
    plan = load_checked(here / "plan.json")
    assert plan.optimizer_bytes == 4 and not plan.distributed_optimizer


def test_unknown_device_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(replace(profile(random.Random(0), 12, 5), device="NVIDIA L40S"), "p.json")
    save_cluster(replace(cluster(), device="p.json"), "c.yaml")
    assert main(f"{ASKED} {FAST} -o plan.json".split()) == 2
    assert "its devices (NVIDIA L40S) is unknown" in capsys.readouterr().err
    assert not (here / "plan.json").exists()


def test_tune_advises_where_nothing_fits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_cluster(cluster(1, 4, memory_gb=0.8), "c.yaml")
    asked = f"{ASKED} --seconds 60 --solver none --no-recompute --tensor 1 -o plan.json"
    assert main(asked.split()) == 2
    error = capsys.readouterr().err
    assert "nothing fits: each device has 0.8 GB; the smallest config found needs about" in error
    assert "recomputation do not fit either; more nodes were not tried" in error.splitlines()[-2]
    assert "FSDP2 does not fit either" in error.splitlines()[-1]
    assert not (here / "plan.json").exists()


def test_plan_of_a_layer_table_is_shown_and_not_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = profile(random.Random(0), 12, 5)
    save_profile(replace(whole, backbone={"table": "layers"}), "p.json")
    assert main(f"{ASKED} {FAST} -o plan.json".split()) == 0
    assert main("show plan.json -o plan.html".split()) == 0
    assert "not run: layers is a table of layers" in capsys.readouterr().out
    assert main("check plan.json".split()) == 2
    assert "the layers of layers come from a table and cannot run" in capsys.readouterr().err
    made = json.loads((here / "plan.json").read_text())
    del made["backbone"]["table"], made["xxh3_128"]
    (here / "plan.json").write_text(json.dumps(made))
    assert main("show plan.json".split()) == 2
    assert "backbone.name is missing" in capsys.readouterr().err
