"""Edited plans: ``pulse check`` works everything out again, and says what differs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.layouts import FOLD_EXACT
from megatron_pulse.planner.plan_file.plan_file import PlanFileError, read_plan, save_plan
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.profile.layer_records import ShardSums
from megatron_pulse.profile.profile import Profile, Source
from tests.planner.tune.problems import cluster
from tests.plans import small_plan, small_profile
from tests.reference import unsealed_record

Record = dict[str, Any]
Edit = Callable[[Record], object]


def sharded() -> Profile:
    """Two thirds of the parameters are divided by tensor parallelism; in 16 bits."""
    profile = small_profile()
    return replace(
        profile,
        dtype="bfloat16",
        layers=tuple(
            replace(
                layer,
                parameters=3_000_000,
                boundary_bytes=layer.boundary_bytes // 2,
                sharded_parameters=2_000_000,
                shard_sums=ShardSums((layer.boundary_bytes,), (layer.boundary_bytes,)),
            )
            for layer in profile.layers
        ),
        skips=tuple(replace(skip, num_bytes=skip.num_bytes // 2) for skip in profile.skips),
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Plan of the tuner for two nodes of four devices: all three degrees are 2."""
    machines = Cluster(
        "two nodes",
        2,
        4,
        1.0,
        DeviceFigures(1.0, 50.0),
        ClusterLink("pcie", 2.0, 10.0, BandwidthScope.DEVICE),
        ClusterLink("ethernet", 0.5, 50.0, BandwidthScope.NODE),
    )
    evaluator = Evaluator(sharded(), machines, 16, sequence_parallel=True)
    choices = Choices(
        (FOLD_EXACT,),
        (2,),
        (2,),
        (2,),
        (True,),
        (False,),
        (Recompute.NEVER,),
        distributed_optimizer=(True,),
    )
    found = tune(evaluator, choices, 2.5, 0.5, "none")
    path = tmp_path_factory.mktemp("sound") / "plan.json"
    save_plan(plan_of(found.outcomes[0], evaluator), path)
    record: Record = unsealed_record(path)
    assert (record["data"], record["placement"], record["num_chunks"]) == (2, "fold", 2)
    return record


def put(*path: str | int, to: Any) -> Edit:
    """Set what is at ``path``, or make it what ``to`` makes of it."""

    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = to(record[path[-1]]) if callable(to) else to

    return change


def times(factor: float, *path: str | int) -> Edit:
    return put(*path, to=lambda value: type(value)(value * factor))


def both(*edits: Edit) -> Edit:
    return lambda record: [edit(record) for edit in edits]


def move(source: int, destination: int) -> Edit:
    """A layer at the end of one stage to the one behind it, or back."""

    def change(record: Record) -> None:
        stages = record["stages"]
        if source < destination:
            stages[destination].insert(0, stages[source].pop())
        else:
            stages[destination].append(stages[source].pop(0))

    return change


def swap(first: tuple[int, int], second: tuple[int, int]) -> Edit:
    """Two layers."""

    def change(record: Record) -> None:
        (a, i), (b, j) = first, second
        stages = record["stages"]
        stages[a][i], stages[b][j] = stages[b][j], stages[a][i]

    return change


def later(record: Record) -> None:
    """Weight gradients only after all other operations of a device, which is legal, and longer."""
    record["schedule"]["order"] = [
        sorted(order, key=lambda op: op[0] == "W") for order in record["schedule"]["order"]
    ]
    record["times"]["cap_bytes"] = [1e9, 1e9]


def added_bubble_task(record: Record) -> None:
    """A bubble task that the plan did not have."""
    record["schedule"]["bubble_tasks"] = [{"name": "x", "slice_seconds": [3.0], "devices": None}]
    record["schedule"]["order"][0].insert(1, "X0:0")


def half_bound(record: Record) -> None:
    """A bound that holds, and says less, with a proof."""
    known = record["provenance"]["schedule"]
    known |= {"proved": True, "lower_bound": known["makespan"] / 2, "gap": 1.0}


def sooner(factor: float) -> Edit:
    """A step that is shorter in every figure of it."""
    return both(
        *(times(factor, "predicted", name) for name in ("step_s", "pipeline_s", "optimizer_s")),
        times(factor, "predicted", "exposed_reduction_s"),
        times(1 / factor, "predicted", "samples_per_s"),
    )


KNOWN = ("provenance", "schedule")
CLUSTER = ("provenance", "cluster")
LINKS = (*CLUSTER, "links")
LAYER = ("profile", "times", "2", 3)

EDITS: dict[str, tuple[Edit, str]] = {
    "batch": (
        both(*(times(2, n) for n in ("global_batch_size", "micro_batch_size")),
             times(2, "predicted", "samples_per_s")),
        "micro_batch_size is 4; profile has costs for microbatch size 2",
    ),
    "batch alone": (times(2, "global_batch_size"), "the schedule has 4 microbatches"),
    "microbatch": (times(0.5, "micro_batch_size"), "the schedule has 4 microbatches"),
    "float32": (put("dtype", to="float32"), "dtype is 'float32'; recomputed from profile it is"),
    "float16": (put("dtype", to="float16"), "it is 'bfloat16'"),
    "more replicas": (
        both(put("data", to=4), put("tensor", to=1), put("sequence_parallel", to=False),
             times(2, "global_batch_size"), times(2, "predicted", "samples_per_s")),
        "predicted.data_bytes_per_sample is",
    ),
    "one replica": (
        both(put("data", to=1), times(0.5, "global_batch_size"),
             times(0.5, "predicted", "samples_per_s")),
        "predicted.exposed_reduction_s is",
    ),
    "replicas beyond": (
        both(put("data", to=4), times(2, "global_batch_size")),
        "the plan is for 16 ranks; two nodes has 8",
    ),
    "no tensor": (
        both(put("tensor", to=1), put("sequence_parallel", to=False)), "times.forward.0 is"
    ),
    "tensor beyond": (put("tensor", to=4), "the plan is for 16 ranks"),
    "odd tensor": (put("tensor", to=3), "tensor: 3 ranks do not fill nodes of 4"),
    "sequence": (put("sequence_parallel", to=False), "times.saved_bytes.0 is"),
    "ranks": (
        put("rank_order", to=lambda r: "tp-pp-dp" if r == "tp-dp-pp" else "tp-dp-pp"),
        "times.edges.0.2 is",
    ),
    "recompute": (
        lambda r: r["activations"].update({r["stages"][0][1]: "recompute"}),
        "times.backward.0 is",
    ),
    "recompute what": (
        put("activations", to={"attic": "recompute"}),
        "activations: no stage has a layer 'attic'",
    ),
    "recompute how": (
        lambda r: r["activations"].update({r["stages"][0][1]: "twice"}),
        "'twice'",
    ),
    "optimizer": (put("distributed_optimizer", to=False), "predicted.memory_bytes.0 is"),
    "ema": (put("ema", to=True), "predicted.memory_bytes.0 is"),
    "half gradients": (put("grad_reduce_in_bf16", to=True), "predicted.memory_bytes.0 is"),
    "overlap": (put("overlap_grad_reduce", to=False), "overlap_grad_reduce is False"),
    "first layer moved": (move(1, 0), "times.forward.0 is"),
    "last layer moved": (move(2, 3), "times.forward.3 is"),
    "turn moved": (move(1, 2), "times.weight_grad.1 is"),
    "layers swapped": (swap((0, 0), (3, 0)), "stages: layer 0 is"),
    "order in a stage": (swap((1, 0), (1, 1)), "in profile it is"),
    "layer lost": (lambda r: r["stages"][3].pop(), "stages: layer 19 is None"),
    "layer renamed": (put("stages", 0, 0, to="stem"), "stages: layer 0 is 'stem'"),
    "placement": (
        both(put("placement", to="interleaved"), put("schedule", "placement", to="interleaved"),
             put("schedule", "device_of_stage", to=[0, 1, 0, 1])),
        "schedule: F2:0 is",
    ),
    "chunks": (put("num_chunks", to=4), "stages: 4, but 2 device(s) with 4 each have 8"),
    "forward": (times(0.5, "times", "forward", 0), "times.forward.0 is"),
    "backward": (times(0.9, "times", "backward", 3), "times.backward.3 is"),
    "weight gradient": (times(2, "times", "weight_grad", 1), "times.weight_grad.1 is"),
    "whole backwards": (put("times", "weight_grad", to=None), "the schedule has operations FIW"),
    "message": (put("times", "edges", 0, 2, to=0), "times.edges.0.2 is 0; recomputed from"),
    "no message": (lambda r: r["times"]["edges"].pop(), "times.edges has 1 values; recomputed"),
    "another message": (lambda r: r["times"]["edges"].append([0, 2, 1e-3]), "profile it has 2"),
    "kept": (times(0.5, "times", "saved_bytes", 0), "times.saved_bytes.0 is"),
    "room": (times(3, "times", "cap_bytes", 1), "times.cap_bytes.1 is"),
    "negative step": (put("predicted", "step_s", to=-5), "predicted.step_s is -5; allowed is"),
    "step": (both(times(2, "predicted", "step_s"), times(0.5, "predicted", "samples_per_s")),
             "predicted.step_s is"),
    "all of a step": (sooner(0.5), "predicted.pipeline_s is"),
    "a little": (sooner(0.9999), "predicted.step_s is"),
    "throughput": (times(2, "predicted", "samples_per_s"), "a step, but global_batch_size is 16"),
    "pipeline": (times(0.9, "predicted", "pipeline_s"), "predicted.pipeline_s is"),
    "reduction": (put("predicted", "exposed_reduction_s", to=0), "predicted.exposed_reduction_s"),
    "optimizer's time": (times(0.5, "predicted", "optimizer_s"), "predicted.optimizer_s is"),
    "a bound of the search": (
        lambda r: r["provenance"].update(
            search={"configs": 9, "simulated": 3, "left": 1, "lower_bound_s": 1e3}
        ),
        "provenance.search.lower_bound_s is 1000, above the",
    ),
    "a search of nothing": (
        lambda r: r["provenance"].update(search={"configs": 0}),
        "provenance.search.configs is 0; allowed is a whole number, 1 or more",
    ),
    "bubble": (put("predicted", "bubble", to=0.0), "predicted.bubble is 0; recomputed from"),
    "memory": (times(0.5, "predicted", "memory_bytes", 0), "predicted.memory_bytes.0 is"),
    "memory beyond": (put("predicted", "memory_bytes", 1, to=2e9), "device 1 needs 2 GB of 1 GB"),
    "sent": (times(0.5, "predicted", "pipeline_bytes_per_sample"), "pipeline_bytes_per_sample is"),
    "reduced": (times(0.5, "predicted", "data_bytes_per_sample"), "data_bytes_per_sample is"),
    "makespan": (times(1.1, *KNOWN, "makespan"), "provenance.schedule.makespan is"),
    "bound above": (times(2, *KNOWN, "lower_bound"), "lower_bound"),
    "both above": (
        both(times(2, *KNOWN, "lower_bound"), times(2, *KNOWN, "makespan")),
        "above the simulated makespan",
    ),
    "proof": (half_bound, "provenance.schedule.proved is true, but lower_bound"),
    "gap": (put(*KNOWN, "gap", to=0.5), "provenance.schedule.gap is 0.5; recomputed from"),
    "faster link": (times(10, *LINKS, "inter_node", "bandwidth_gbs"), "recomputed from profile"),
    "slower node": (times(0.1, *LINKS, "intra_node", "bandwidth_gbs"), "recomputed from"),
    "less memory": (put(*CLUSTER, "memory_gb", to=0.05), "memory: device 0 needs"),
    "fewer nodes": (put(*CLUSTER, "nodes", to=1), "the plan is for 8 ranks; two nodes has 4"),
    "larger nodes": (put(*CLUSTER, "devices_per_node", to=8), "recomputed from profile"),
    "faster device": (put(*CLUSTER, "device", "bandwidth_gbs", to=500), "predicted.optimizer_s is"),
    "collectives": (put(*CLUSTER, "all_reduce_efficiency", to=0.5), "exposed_reduction_s is"),
    "costs": (times(0.5, *LAYER, "forward_s"), "times.forward.0 is"),
    "cost's parts": (
        both(times(0.5, *LAYER, "input_grad_s"), times(2, *LAYER, "weight_grad_s")),
        "times.weight_grad.0 is",
    ),
    "costs' memory": (times(2, *LAYER, "saved_bytes"), "times.saved_bytes.0 is"),
    "costs' peak": (times(100, *LAYER, "peak_bytes"), "predicted.memory_bytes.0 is"),
    "parameters": (times(2, "profile", "layers", 3, "parameters"), "predicted.memory_bytes.0 is"),
    "shards": (put("profile", "layers", 3, "sharded_parameters", to=0), "times.forward.0 is"),
    "odd shards": (
        put("profile", "layers", 3, "sharded_parameters", to=1_999_999), "T = 2 does not divide the"
    ),
    "sums": (put("profile", "layers", 3, "shard_sums", "rows", to=[]), "times.forward.0 is"),
    "boundary": (times(0.5, "profile", "layers", 4, "boundary_bytes"), "takes"),
    "skip": (times(0.5, "profile", "skips", 0, "num_bytes"), "profile.skips.0 (source, dest"),
    "no skip": (lambda r: r["profile"]["skips"].pop(), "profile.skips.3 (source, destination"),
    "costs' dtype": (put("profile", "dtype", to="float32"), "profile.layers.0.boundary_bytes is"),
    "costs at another size": (
        put("profile", "times", to=lambda t: {"4": t["2"]}),
        "micro_batch_size is 2; profile has costs for microbatch size 4",
    ),
    "a layer without costs": (
        both(lambda r: r["profile"]["layers"].pop(), lambda r: r["profile"]["times"]["2"].pop()),
        "in profile it is None",
    ),
    "no costs": (put("profile", to={}), "profile is not a profile"),
    "unsound costs": (put(*LAYER, "forward_s", to=-1), "profile: the profile is not sound"),
    "threads": (put("provenance", "threads", to=8), "provenance.threads is 8; recomputed from"),
    "where costs are from": (put("provenance", "profile", to="x"), "provenance.profile is 'x'"),
    "larger backbone": (
        put("backbone", "options", "embed_dim", to=64), "backbone.options.embed_dim is 64"
    ),
    "deeper backbone": (put("backbone", "options", "depth", to=10), "uvit-tiny has"),
    "another backbone": (put("backbone", "name", to="uvit-s"), "backbone.name is 'uvit-s'"),
    "option left out": (
        lambda r: r["backbone"]["options"].pop("embed_dim"), "backbone.options.embed_dim is missing"
    ),
    "what waits left out": (lambda r: r["times"].pop("wgrad_bytes"), "times.wgrad_bytes is"),
    "conditioning": (
        lambda r: r["profile"]["conditioning"].append(
            {"name": "t", "source": 0, "consumers": [1], "num_bytes": 8, "embedder": True}
        ),
        "profile.conditioning.0 (source, consumers, bytes, embedder) is (0, (1,), 8, True); that",
    ),
    "chains": (put("profile", "layers", 3, "begins", to=True), "profile.layers.3.begins is true"),
    "more microbatches": (put("schedule", "num_microbatches", to=5), "the schedule has 5 micro"),
    "fewer microbatches": (put("schedule", "num_microbatches", to=2), "the schedule has 2 micro"),
    "operation lost": (lambda r: r["schedule"]["order"][0].pop(), "is missing on device 0"),
    "another order": (later, "provenance.schedule.makespan is"),
    "a bubble task": (added_bubble_task, "provenance.schedule.makespan is"),
}  # fmt: skip


def refusal(record: Record, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Error text of ``pulse check``; empty if the plan can run."""
    file = folder / "plan.json"
    file.write_text(json.dumps(record))
    code = main(["check", str(file)])
    out, err = capsys.readouterr()
    assert code == (2 if err else 0) and bool(out) != bool(err) and "Traceback" not in err
    return err


def test_a_sound_plan_is_not_refused(
    sound: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(EDITS) >= 40
    assert not refusal(sound, tmp_path, capsys)
    assert load_checked(tmp_path / "plan.json") == read_plan(tmp_path / "plan.json")[1]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_refused_with_the_reason(
    name: str, sound: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, reason = EDITS[name]
    record = copy.deepcopy(sound)
    edit(record)
    assert record != sound
    assert reason in refusal(record, tmp_path, capsys)


def test_all_that_differs_is_said_at_once_with_what_it_is(
    sound: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = copy.deepcopy(sound)
    forward, held = record["times"]["forward"][2], record["predicted"]["memory_bytes"][1]
    for name in ("bubble", "float32", "faster device"):
        EDITS[name][0](record)
    times(0.5, "times", "forward", 2)(record)
    times(0.5, "predicted", "memory_bytes", 1)(record)
    said = refusal(record, tmp_path, capsys)
    assert (
        f"times.forward.2 is {forward / 2:.8g}; recomputed from profile it is {forward:.8g}" in said
    )
    assert f"memory_bytes.1 is {held / 2:.8g}; recomputed from profile it is {held:.8g}" in said
    for name in ("bubble", "float32", "faster device"):
        assert EDITS[name][1] in said


def test_a_run_refuses_it_too(sound: Record, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    record = copy.deepcopy(sound)
    move(2, 3)(record)
    file.write_text(json.dumps(record))
    assert not read_plan(file)[2]
    with pytest.raises(PlanFileError, match="times.forward.3 is"):
        load_checked(file)


@pytest.mark.parametrize("version", ["4", "6"])
def test_another_version_is_one_error_that_says_what_to_do(
    version: str, sound: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {**sound, "format": f"megatron_pulse plan {version}"}
    del record["profile"]
    said = refusal(record, tmp_path, capsys)
    assert "Make it anew with 'pulse tune --backbone uvit-tiny" in said
    depth = record["backbone"]["options"]["depth"]
    assert f" --option depth={depth} " in said and " --option final_conv=true " in said
    assert "--global-batch-size 16" in said and len(said.splitlines()) == 1
    assert main(["check", str(tmp_path / "plan.json"), "--json"]) == 2
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["can_run"] and verdict["faults"][0] in said


@pytest.mark.parametrize("kind", ["fold", "sequential"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_what_the_tuner_makes_comes_to_the_same(
    kind: str, split: bool, recompute: bool, pipeline: int, tmp_path: Path
) -> None:
    plan = small_plan(kind, split and pipeline > 1, pipeline, recompute)
    save_plan(plan, tmp_path / "plan.json")
    assert load_checked(tmp_path / "plan.json") == plan


def test_a_plan_s_caution_is_of_what_was_measured(tmp_path: Path) -> None:
    """Only measured sizes are named."""
    whole = small_profile()
    noisy = {
        size: tuple(replace(x, forward_spread_s=x.whole_s) for x in layers)
        for size, layers in whole.times.items()
    }
    measured = replace(whole, source=Source.MEASURED, times=noisy)
    of = Evaluator(measured, cluster(1, 2, 16.0), 16)
    plan = plan_of(of.evaluate(Config(2, 1, 1, 8, FOLD_EXACT)), of)
    assert 8 not in measured.micro_batch_sizes
    said = plan.provenance["unsteady"]
    assert "spread over more than" in said and "at microbatch size 8" not in said
    save_plan(plan, tmp_path / "plan.json")
    assert load_checked(tmp_path / "plan.json").provenance["unsteady"] == said
