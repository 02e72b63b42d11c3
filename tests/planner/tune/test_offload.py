"""Plans with activation offload: written, checked, and faster under low memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.plan_file.plan_file import (
    PlanFile,
)
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.search import search
from tests.planner.tune.problems import cluster, profile
from tests.plans import Edit, assert_refused, shown


def evaluator(host_gbs: float = 50.0, memory_gb: float = 1.6) -> Evaluator:
    """Eight stages in a row that hold many microbatches, and hardly have room for them."""
    chain = profile(random.Random(5), 24, 0, parameters=1_000_000, saved_mb=100.0)
    return Evaluator(chain, cluster(1, 8, memory_gb, host_gbs=host_gbs), 24)


CONFIG = Config(
    8, 1, 1, 1, LAYOUTS["sequential"], split=True, max_in_flight=True, recompute=Recompute.HOST
)


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    of = evaluator()
    return plan_of(of.evaluate(CONFIG), of)


def test_a_plan_says_what_waits_on_the_host(
    plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.activations.offload and plan.schedule.offloaded
    assert faults_for(plan.problem, plan.schedule) == []
    said = shown(plan, tmp_path, capsys)
    assert "activations: offload " in said
    assert " GB a step, at most " in said and "ms each way, beside computation" in said
    assert "GB pinned" in said
    usable = evaluator().cluster.usable_bytes
    assert max(plan.predicted["memory_bytes"]) <= usable
    without = evaluator().evaluate(replace(CONFIG, recompute=Recompute.NEVER))
    assert max(without.memory_bytes) <= usable
    assert plan.predicted["step_s"] < 0.97 * without.step_s


def named(record: Any, policy: str) -> list[str]:
    return [name for name, how in record["activations"].items() if how == policy]


def first_copy(record: Any) -> tuple[list[str], str]:
    order = next(line for line in record["schedule"]["order"] if any("O" in op for op in line))
    return order, next(op for op in order if op.startswith("O"))


def leave_out_reload(record: Any) -> None:
    order, op = first_copy(record)
    order.remove(op.replace("O", "L"))


def keep_all(record: Any) -> None:
    for order in record["schedule"]["order"]:
        order[:] = [op for op in order if op[0] not in "OL"]


EDITS: dict[str, Edit] = {
    "a layer less": (
        lambda r: r["activations"].pop(named(r, "offload")[0]),
        "times.offload_bytes.",
    ),
    "none": (
        lambda r: [r["activations"].pop(name) for name in named(r, "offload")],
        "all of them or none",
    ),
    "an unknown layer": (
        lambda r: r["activations"].update(other="offload"),
        "activations: no stage has a layer 'other'",
    ),
    "a faster link": (
        lambda r: r["provenance"]["cluster"]["links"]["host"].update(bandwidth_gbs=100.0),
        "times.offload_s.",
    ),
    "no link": (lambda r: r["provenance"]["cluster"]["links"].pop("host"), "no link to the host"),
    "nothing comes back": (leave_out_reload, "but not L"),
    "all is kept": (keep_all, "at its peak; the cap is"),
    "less time": (lambda r: r["times"]["offload_s"].__setitem__(0, 1e-6), "times.offload_s.0"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_refused(edit: str, plan: PlanFile, tmp_path: Path) -> None:
    assert_refused(plan, EDITS[edit], tmp_path)


def test_the_search_finds_it_where_it_is_better_and_not_without_a_link() -> None:
    choices = Choices(
        (LAYOUTS["sequential"],), (8,), (1,), (1,), split=(True,), max_in_flight=(True,)
    )
    best = {}
    for host_gbs in (0.0, 0.5, 50.0):
        of = evaluator(host_gbs)
        best[host_gbs] = search(of, of.candidates(choices)).outcomes[0]
    assert best[50.0].config.recompute is Recompute.HOST and best[50.0].stages.activations.offload
    assert best[0.0].config.recompute is not Recompute.HOST
    assert best[50.0].step_s < best[0.5].step_s <= best[0.0].step_s
    for memory_gb in (0.9, 1.0, 1.2, 1.4):
        short = evaluator(50.0, memory_gb)
        found = search(short, short.candidates(choices)).outcomes
        assert found and all(map(short.has_room, found))
    kinds = {op.kind for order in best[50.0].synthesis.schedule.order for op in order}
    assert kinds >= {OpType.OFFLOAD, OpType.RELOAD}
