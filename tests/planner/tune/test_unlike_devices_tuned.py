"""Tuning on unlike devices: composed costs, bounds, orders, plans, and their checks."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import from_record, to_record
from megatron_pulse.planner.layout.layouts import LAYOUTS, WHOLE
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.plan_file.compatibility import machine_faults
from megatron_pulse.planner.plan_file.plan_file import (
    PlanFileError,
    read_plan,
    save_plan,
)
from megatron_pulse.planner.plan_file.plan_file import to_record as plan_record
from megatron_pulse.planner.tune.config import Choices, Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.profile.files import from_record as profile_from_record
from megatron_pulse.profile.files import to_record as profile_record
from megatron_pulse.profile.profile import ProfileError
from megatron_pulse.profile.unlike_devices import combine
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.unlike import box, random_unlike, slower, with_kinds

SEQUENTIAL, FOLD = LAYOUTS["sequential"], LAYOUTS["fold exact"]


def test_a_cut_chain_has_the_seconds_of_each_layers_device() -> None:
    for seed in range(20):
        evaluator, rng = random_unlike(seed), random.Random(seed)
        costs, where = evaluator.costs, evaluator.cluster
        config = Config(where.num_devices, 1, 1, 1, SEQUENTIAL)
        config = rng.choice(list(costs.orders(config)))
        num = len(evaluator.profile.layers)
        cuts = (0, *sorted(rng.sample(range(1, num), config.pipeline - 1)), num)
        stages = evaluator.stages.build(
            config, Partition(config.placement, cuts), ActivationPolicies()
        )
        machine = where.with_order(config.device_order or range(where.num_devices))
        for i in range(num):
            kind = machine.kind_of(stages.partition.device_of_layer(i))
            own = evaluator.profile.of_kind(kind.name).times_at(1)[i]
            assert stages.costs.forward_s[i] == own.forward_s
            assert stages.costs.backward_s[i] == own.input_grad_s + own.weight_grad_s
        limits = [machine.kind_of(rank).usable_bytes for rank in range(config.pipeline)]
        assert list(stages.usable_bytes) == limits


def test_a_place_of_unlike_replicas_counts_as_its_slowest_and_smallest() -> None:
    rng = random.Random(1)
    chain = profile(rng, 8, 0)
    own = {"a": chain, "b": slower(chain, rng, (0.5, 2.0))}
    evaluator = Evaluator(combine(own), with_kinds(cluster(1, 2), "ab", (16.0, 10.0)), 4)
    config = Config(1, 2, 1, 1, WHOLE)
    stages = evaluator.cut(config, Partition(config.placement, (0, 8)))
    rows = zip(own["a"].times_at(1), own["b"].times_at(1), strict=True)
    assert stages.costs.forward_s == tuple(max(a.forward_s, b.forward_s) for a, b in rows)
    assert stages.usable_bytes == (10e9,)
    assert len(list(evaluator.costs.orders(config))) == 1, "no order changes it"


@pytest.mark.parametrize("block", range(3))
def test_bounds_are_below_simulated_steps(block: int) -> None:
    num = 0
    for seed in range(4 * block, 4 * block + 4):
        evaluator, rng = random_unlike(seed), random.Random(seed)
        configs = evaluator.candidates(Choices(tensor=(1, 2), micro_batch_size=(1, 2)))
        for config in rng.sample(configs, min(6, len(configs))):
            with suppress(UnfitError):
                evaluator.refuse(config)
                found = evaluator.evaluate(config, quick=True)
                num += 1
                most = found.step_s * (1 + 1e-9)
                assert evaluator.estimator.quick_bound(config) <= most
                assert evaluator.bound(config, found.stages) <= most
    assert num > 10


def test_no_partition_is_below_the_bound_before_partitioning() -> None:
    """All cuts of small chains, not only those that the search would make."""
    for seed in range(8):
        evaluator = box((40.0, 40.0), (0.5, 3.0), batch=4, layers=6 + seed % 2, skips=0)
        num = len(evaluator.profile.layers)
        for config in evaluator.costs.orders(Config(2, 1, 1, 1, SEQUENTIAL, split=seed % 2 == 0)):
            least = evaluator.estimator.quick_bound(config)
            for cut in range(1, num):
                stages = evaluator.cut(config, Partition(config.placement, (0, cut, num)))
                step_s = evaluator.evaluate(config, quick=True, stages=stages).step_s
                assert least <= step_s * (1 + 1e-9)


def test_orders_keep_nodes_together_and_tensor_parallel_groups_alike() -> None:
    chain = profile(random.Random(0), 12, 0)
    own = {"a": chain, "b": slower(chain, random.Random(1), (2.0, 2.0))}
    machine = with_kinds(cluster(2, 4), "abababbb", (16.0, 16.0))
    evaluator = Evaluator(combine(own), machine, 8)
    found = evaluator.candidates(Choices(tensor=(1, 2), pipeline=(4,), micro_batch_size=(1,)))
    assert found
    for config in found:
        ranks = evaluator.costs.ranks(config)
        nodes = [machine.node_of(device) for device in config.device_order or range(8)]
        assert nodes in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
        for device in range(config.pipeline):
            for replica in range(config.data):
                group = [ranks.rank(device, replica, k) for k in range(config.tensor)]
                assert len({ranks.cluster.kind_of(rank).name for rank in group}) == 1
    assert max(Counter(replace(one, device_order=()) for one in found).values()) <= 6
    two = Evaluator(combine(own), with_kinds(cluster(1, 2), "ab", (16.0, 16.0)), 8)
    orders = [c.device_order for c in two.costs.orders(Config(2, 1, 1, 1, FOLD))]
    assert sorted(orders) == [(), (1, 0)]


def tuned(evaluator: Evaluator) -> Tuning:
    choices = Choices(micro_batch_size=(1, 2), fsdp=False)
    return tune(evaluator, choices, 1.0, solver="none", keep=3)


@pytest.fixture(scope="module")
def small_box() -> tuple[Evaluator, Tuning]:
    evaluator = box((4.2, 3.0))
    return evaluator, tuned(evaluator)


def test_a_plan_uses_what_each_device_can(small_box, tmp_path: Path) -> None:
    """The smaller, slower device gets fewer layers, and the plan beats that for two of it."""
    evaluator, found = small_box
    best = found.outcomes[0]
    places = evaluator.costs.places(best.config)
    assert all(n <= p.usable_bytes for n, p in zip(best.memory_bytes, places, strict=True))
    plan = plan_of(best, evaluator, found)
    save_plan(plan, tmp_path / "p.json")
    again = load_checked(tmp_path / "p.json")
    assert again.device_order == (best.config.device_order or None)
    assert [place.name for place in again.places] == [place.name for place in places]
    assert again.profile.kinds.keys() == {"a", "b"}
    homes = [best.stages.partition.device_of_layer(i) for i in range(14)]
    slow = [place.name for place in places].index("b")
    assert 0 < homes.count(slow) < 7
    alike = Evaluator(evaluator.profile.of_kind("b"), cluster(1, 2, 3.0), 16)
    with suppress(ValueError):
        assert best.throughput > tuned(alike).outcomes[0].throughput


def test_a_plan_in_another_order_of_devices_is_refused(small_box, tmp_path: Path) -> None:
    evaluator, found = small_box
    plan = plan_of(found.outcomes[0], evaluator)
    other = (1, 0) if plan.device_order is None else (0, 1)
    save_plan(replace(plan, device_order=other), tmp_path / "p.json")
    with pytest.raises(PlanFileError, match="recomputed from profile|memory: device"):
        load_checked(tmp_path / "p.json")
    record = plan_record(replace(plan, device_order=other))
    full = [place.usable_bytes for place in plan.places]
    record["predicted"] = {**record["predicted"], "memory_bytes": full}
    (fault,) = machine_faults(record)
    assert fault.startswith("memory: device ") and "(b) needs 4.2 GB of 3 GB" in fault
    renamed = replace(plan.profile, kinds={"a": plan.profile.kinds["a"]})
    save_plan(replace(plan, profile=renamed), tmp_path / "p.json")
    with pytest.raises(PlanFileError, match="has devices of kind b, and costs are known of a"):
        load_checked(tmp_path / "p.json")
    save_plan(replace(plan, device_order=(0, 0)), tmp_path / "p.json")
    faults = read_plan(tmp_path / "p.json")[2]
    assert "device_order: lists each of the devices 0 to 1 once" in faults


def test_one_kind_is_planned_as_an_ordinary_cluster() -> None:
    chain, plain = profile(random.Random(0), 10, 3), cluster(1, 2, 8.0)
    record = to_record(plain)
    kind = {name: record.pop(name) for name in ("device", "memory_gb")}
    record |= {"kinds": {"only": kind}, "nodes": [{"devices": ["only", "only"]}]}
    config = Config(2, 1, 1, 1, FOLD, split=True)
    plans = []
    for machine in (plain, from_record(record)):
        evaluator = Evaluator(chain, machine, 4)
        assert all(not each.device_order for each in evaluator.candidates(Choices()))
        plans.append(json.dumps(plan_record(plan_of(evaluator.evaluate(config), evaluator))))
    known = [json.loads(plan) for plan in plans]
    for plan in known:
        plan["provenance"]["schedule"].pop("seconds", None)
    assert known[0] == known[1] and "device_order" not in known[0]
    assert "kinds" not in known[0]["profile"]


def test_profiles_of_kinds_round_trip_and_must_match() -> None:
    chain = profile(random.Random(0), 6, 2)
    both = combine({"a": chain, "b": slower(chain, random.Random(1), (2.0, 3.0))})
    again = profile_from_record(json.loads(json.dumps(profile_record(both))), "p")
    assert again == both and again.kinds == both.kinds
    assert again.of_kind("a").times == chain.times
    for size, rows in both.times.items():
        pairs = zip(rows, chain.times[size], strict=True)
        assert all(row.forward_s >= own.forward_s for row, own in pairs)
    layers = list(chain.layers)
    layers[2] = replace(layers[2], parameters=7, sharded_parameters=7)
    rows = {size: list(own) for size, own in chain.times.items()}
    rows[8][3] = replace(rows[8][3], saved_bytes=5, peak_bytes=4)
    times = {size: tuple(own) for size, own in rows.items()}
    wrong = replace(chain, dtype="float16", layers=tuple(layers), times=times)
    with pytest.raises(ProfileError) as error:
        combine({"a": chain, "b": wrong})
    for fault in (
        "b, beside a: dtype is 'float16', not 'bfloat16'",
        "layer 'layer2': parameters is 7",
        "layer 'layer3' at 8: saved_bytes is 5",
    ):
        assert fault in str(error.value)
    assert "peak_bytes" not in str(error.value), "libraries choose working memory"
