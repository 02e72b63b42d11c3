"""Plans for several numbers of ranks: which one a run takes, and what clusters they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import cluster
from megatron_pulse.planner.plan_file.elastic import (
    distributed_optimizer_of_folder,
    plan_for_world,
    world_file,
)
from megatron_pulse.planner.plan_file.plan_file import PlanFileError
from megatron_pulse.planner.tune.config import Choices, configs
from megatron_pulse.planner.tune.plans.verify_figures import load_checked

OURS = """
name: ours
nodes: 3
devices_per_node: 2
memory_gb: 4
device: A100-80GB
links:
  intra_node: {kind: other, bandwidth_gbs: 10, latency_us: 5, shared: device}
  inter_node: {kind: other, bandwidth_gbs: 1, latency_us: 20, shared: node}
"""


@pytest.mark.parametrize(
    "num_devices, shape", [(6, (3, 2)), (4, (2, 2)), (2, (1, 2)), (1, (1, 1)), (3, None), (8, None)]
)
def test_parts_of_a_cluster(
    num_devices: int, shape: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    part = cluster(str(tmp_path / "ours.yaml")).part(num_devices)
    assert (None if part is None else (part.nodes, part.devices_per_node)) == shape


@pytest.mark.parametrize("divided", [True, False])
def test_one_device_has_the_optimizer_of_several(divided: bool) -> None:
    """A run goes from one to the other with its state; one device alone was never divided."""
    alone = list(configs(1, 1, 4, True, Choices(distributed_optimizer=(divided,))))
    assert alone and all(config.distributed_optimizer is divided for config in alone)
    assert {c.distributed_optimizer for c in configs(1, 1, 4, True, Choices())} == {False}


def test_plans_that_are_there_say_which_optimizer(tmp_path: Path) -> None:
    assert distributed_optimizer_of_folder(tmp_path, [2]) is None
    for world, divided in ((1, True), (2, False)):
        record = {"distributed_optimizer": divided}
        world_file(tmp_path, world).write_text(json.dumps(record))
    assert distributed_optimizer_of_folder(tmp_path, [2]) is True
    assert distributed_optimizer_of_folder(tmp_path, [1]) is False
    with pytest.raises(PlanFileError, match=r"world-1.json divides .*, world-2.json does not"):
        distributed_optimizer_of_folder(tmp_path, [3])


def test_a_plan_for_each_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    words = [
        "tune", "--backbone", "uvit-tiny", "--cluster", str(tmp_path / "ours.yaml"),
        "--global-batch-size", "16", "--seconds", "0.4", "--solver", "none",
    ]  # fmt: skip
    plans = tmp_path / "plans"
    assert main([*words, "--world-sizes", "4,2,1", "-o", str(plans)]) == 0
    *every, faster = capsys.readouterr().out.splitlines()
    # On a busy machine a second finds little, and FSDP2 is said to be ahead.
    said = [line for line in every if not line.startswith("  FSDP2")]
    assert [line.split(" devices: ")[0] for line in said] == ["4", "2", "1"]
    rates = [float(line.split("; ")[1].split()[0]) for line in said]
    best = ("4", "2", "1")[rates.index(max(rates))]
    assert best != "4" and f"{best} devices are predicted to train this batch" in faster
    more = float(faster.split("%")[0].split()[-1])
    assert more == pytest.approx(100 * (max(rates) / rates[0] - 1), abs=0.2)
    assert "faster than 4" in faster
    kinds = set()
    for world in (4, 2, 1):
        file = plan_for_world(plans, world)
        assert file == world_file(plans, world)
        plan = load_checked(file)
        assert plan.world_size == world and plan.global_batch_size == 16
        kinds.add(plan.distributed_optimizer)
    assert len(kinds) == 1
    assert main([*words, "--world-sizes", "3,9", "-o", str(plans)]) == 2
    fault = capsys.readouterr().err
    assert (
        "--world-sizes 3: ours has 3 node(s) of 2 devices" in fault and "--world-sizes 9" in fault
    )
    assert main([*words, "--world-sizes", "x"]) == 2
    fault = capsys.readouterr().err
    assert "--world-sizes x: write whole numbers" in fault and "give -o DIR" in fault


def test_what_there_is_no_plan_for(tmp_path: Path) -> None:
    def write(name: str, *degrees: int) -> None:
        record = dict(zip(("pipeline", "data", "tensor"), degrees, strict=True))
        (tmp_path / name).write_text(json.dumps(record))

    write("a.json", 2, 2, 1)
    write("b.json", 2, 1, 1)
    (tmp_path / "c.json").write_text("[]")
    assert plan_for_world(tmp_path, 4) == tmp_path / "a.json"
    assert plan_for_world(tmp_path / "b.json", 4) == tmp_path / "b.json"
    with pytest.raises(PlanFileError) as error:
        plan_for_world(tmp_path, 3)
    for text in ("no plan for 3 rank(s)", "a.json is for 4", "b.json is for 2", "c.json: no plan"):
        assert text in str(error.value)
    write("d.json", 1, 4, 1)
    with pytest.raises(PlanFileError, match=r"more than one plan for 4 rank\(s\) \(a.json, d.json"):
        plan_for_world(tmp_path, 4)
