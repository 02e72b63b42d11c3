"""Plans as files: read as they were written, and every fault of one is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.plan_file.plan_file import (
    PlanFileError,
    read_plan,
    save_plan,
)
from megatron_pulse.planner.program.simulate import link_bound
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.plans import small_plan
from tests.reference import unsealed_record

Record = dict[str, Any]
KINDS = [("fold", True, 2), ("fold", False, 3), ("sequential", False, 2), ("sequential", False, 1)]


@pytest.mark.parametrize(("kind", "split", "pipeline"), KINDS)
def test_a_plan_is_read_as_it_was_written(
    kind: str, split: bool, pipeline: int, tmp_path: Path
) -> None:
    plan = small_plan(kind, split, pipeline)
    save_plan(plan, tmp_path / "new" / "plan.json")
    again = load_checked(tmp_path / "new" / "plan.json")
    assert again == plan and [p.name for p in (tmp_path / "new").iterdir()] == ["plan.json"]
    assert again.world_size == 2 * pipeline and again.num_microbatches == 4
    names = [name for stage in plan.stages for name in stage]
    assert [
        names[i] for s in range(len(plan.stages)) for i in again.partition.layers_of_stage(s)
    ] == names
    assert not faults_for(again.problem, again.schedule)


def test_the_replay_knows_every_message() -> None:
    plan = small_plan(split=True)
    replayed = plan.simulate_step()
    line, edges = replayed.timeline, plan.edges
    assert len(replayed.transfers) == 2 * len(edges) * plan.num_microbatches > 0
    for transfer in replayed.transfers:
        assert transfer.end <= line.start[transfer.consumer] + 1e-12
    for device, seconds in enumerate(replayed.sending_s):
        mine = sorted((t.start, t.end) for t in replayed.transfers if device in (t.source,))
        assert seconds == pytest.approx(sum(end - start for start, end in mine))
        received = sorted((t.start, t.end) for t in replayed.transfers if t.destination == device)
        for spans in (mine, received):  # one message at a time
            assert all(a[1] <= b[0] + 1e-12 for a, b in zip(spans, spans[1:], strict=False))
    assert line.makespan >= link_bound(plan.problem, edges)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(small_plan(), path)
    found: Record = unsealed_record(path)
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken") / "plan.json"


def put(*path: str | int, value: Any) -> Callable[[Record], None]:
    """Set what is at ``path``."""

    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Record], None]:
    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        del record[path[-1]]

    return change


FORM: dict[str, Callable[[Record], None]] = {
    "format is 'other'; allowed is": put("format", value="other"),
    "backbone.name is missing": drop("backbone", "name"),
    "dtype is 'int8'": put("dtype", value="int8"),
    "pipeline is 0; allowed is a whole number, 1 or more": put("pipeline", value=0),
    "data is 1.5": put("data", value=1.5),
    "tensor is missing": drop("tensor"),
    "sequence_parallel is 1": put("sequence_parallel", value=1),
    "rank_order is 'pp-dp-tp'; allowed is one of tp-dp-pp": put("rank_order", value="pp-dp-tp"),
    "placement is 'ring'": put("placement", value="ring"),
    "stages.1.0 is 7": put("stages", 1, 0, value=7),
    "stages.2 is []": put("stages", 2, value=[]),
    "schedule.order.0.1 is 'Q0:1'; allowed is an operation": put(
        "schedule", "order", 0, 1, value="Q0:1"
    ),
    "schedule.order.1.0 is 'F01:0'": put("schedule", "order", 1, 0, value="F01:0"),
    "schedule.num_microbatches is -1": put("schedule", "num_microbatches", value=-1),
    "times.forward.0 is -1": put("times", "forward", 0, value=-1.0),
    "times.backward.1 is 10000000000.0": put("times", "backward", 1, value=1e10),
    "times.edges.0 is [0, 1]; allowed is [stage, stage, seconds]": put(
        "times", "edges", 0, value=[0, 1]
    ),
    "times.saved_bytes is missing": drop("times", "saved_bytes"),
    "times.colour is unknown": put("times", "colour", value="red"),
    "predicted.step_s is 'soon'; allowed is a number": put("predicted", "step_s", value="soon"),
    "provenance.schedule is missing": drop("provenance", "schedule"),
    "spare is unknown": put("spare", value=1),
}

SENSE: dict[str, Callable[[Record], None]] = {
    "num_chunks: 3; a device of fold hosts 2, 4, ... stage(s)": put("num_chunks", value=3),
    "sequence_parallel: requires tensor parallelism": put("sequence_parallel", value=True),
    "layer 'embed' occurs 2 times": lambda r: r["stages"][1].append("embed"),
    "times.forward: 3 values for 4 stages": lambda r: r["times"]["forward"].pop(),
    "times.saved_bytes: 5 values for 4 stages": lambda r: r["times"]["saved_bytes"].append(1),
    "times.cap_bytes: 1 values for 2 device(s)": lambda r: r["times"]["cap_bytes"].pop(),
    "predicted.memory_bytes: 3 values for 2": lambda r: r["predicted"]["memory_bytes"].append(1),
    "global_batch_size 17 is not a multiple of data 2": put("global_batch_size", value=17),
}


def swap(record: Record) -> None:
    """A backward first of all."""
    order = record["schedule"]["order"][1]
    order.insert(0, order.pop(next(i for i, op in enumerate(order) if op[0] == "B")))


ILLEGAL: dict[str, Callable[[Record], None]] = {
    "schedule: F0:0 is missing on device 0": lambda r: r["schedule"]["order"][0].remove("F0:0"),
    "schedule: F1:2 is in the schedule 2 times": lambda r: r["schedule"]["order"][1].append("F1:2"),
    "schedule: device 1 runs B2:0 before F2:0": swap,
    "times.edges: from stage 1 to 9; there are 4": lambda r: r["times"]["edges"].append([1, 9, 1]),
    "times.edges: stages 1 and 2 are on one device": lambda r: r["times"]["edges"].append(
        [1, 2, 0.1]
    ),
    "schedule: device 0 holds": put("times", "cap_bytes", 0, value=210_000.0),
}


@pytest.mark.parametrize("table", [FORM, SENSE, ILLEGAL], ids=["form", "sense", "legality"])
@settings(max_examples=25)
@given(data=st.data())
def test_all_faults_are_listed_at_once(
    table: dict[str, Callable[[Record], None]], data: st.DataObject, record: Record, file: Path
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, unique=True))
    broken = copy.deepcopy(record)
    for text in table:  # in one order, so that indices hold
        if text in chosen:
            table[text](broken)
    written = json.dumps(broken)
    file.write_text(written)
    with pytest.raises(PlanFileError) as error:
        load_checked(file)
    lines = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
    lines = lines or [str(error.value)]
    assert len(lines) == 1 or f"({len(lines)} faults)" in str(error.value).splitlines()[0]
    for text in chosen:
        assert any(text in line for line in lines), (text, lines)
    if table is FORM:
        assert len(lines) == len(chosen)
    assert file.read_text() == written and list(file.parent.iterdir()) == [file]


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all values that can be changed."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path] * bool(path) + [p for key, v in inner for p in paths(v, (*path, key))]


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["F0:0", "X0:0", "fold", "sequential", "bidirectional", "interleaved", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "slice_seconds", "devices"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_is_in_it_a_file_is_a_plan_or_refused(
    data: st.DataObject, record: Record, file: Path
) -> None:
    broken = copy.deepcopy(record)
    put(*data.draw(st.sampled_from(paths(record))), value=data.draw(JUNK))(broken)
    file.write_text(json.dumps(broken))
    try:
        _, plan, faults = read_plan(file)
    except PlanFileError:  # a number that cannot be computed with
        return
    if plan is None:
        assert faults
    elif not faults:
        plan.simulate_step()
        assert not faults_for(plan.problem, plan.schedule)


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "\udcff", "[" * 100_000])
def test_what_is_no_json_cannot_be_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanFileError, match="cannot be read as a plan"):
        load_checked(file)
    with pytest.raises(PlanFileError, match="cannot be read as a plan"):
        load_checked(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    from dataclasses import replace

    file = tmp_path / "plan.json"
    save_plan(small_plan(), file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        save_plan(replace(small_plan(), predicted={"step_s": object()}), file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
