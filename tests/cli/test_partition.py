"""``pulse partition``: what it prints agrees with the planner, and refusals list everything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold, make_placement
from megatron_pulse.planner.partition.evaluate import MemoryRule, evaluate
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.profile.files import save_profile
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.profile_from_table import read_table
from megatron_pulse.profile.roofline import PRESETS, Roofline
from tests.cli.conftest import Refused

WORK = (0.2, 3, 2, 2, 1, 1, 2, 3, 1, 1, 2, 2, 3, 3, 4, 0.3)
LINK = Link(5e-6, 12.5e9)


NESTED = [(i, 15 - i) for i in range(7)]
PARALLEL = [(i, i + 8) for i in range(8)]


def table(skips: list[tuple[int, int]]) -> dict[str, Any]:
    """A small U of 16 units; the outer ones have the larger tensors."""
    num = len(WORK)
    numel = [400_000 // (1 + min(i, num - 1 - i)) for i in range(num)]
    units = [
        {
            "name": f"u{i}",
            "params": round(1e6 * work),
            "flops_fwd": round(5e10 * work),
            "flops_bwd": round(1e11 * work),
            "saved_act_bytes": 20 * numel[i],
            "out_numel": numel[i],
        }
        for i, work in enumerate(WORK)
    ]
    edges = [{"src": i, "dst": j, "numel": numel[i]} for i, j in skips]
    return {"name": "small-u", "units": units, "skips": edges}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tables, and a profile of the nested one at the microbatch sizes 2 and 4."""
    monkeypatch.chdir(tmp_path)
    for name, skips in (("t", NESTED), ("plain", []), ("parallel", PARALLEL)):
        (tmp_path / f"{name}.json").write_text(json.dumps(table(skips)))
    save_profile(profile(), "p.json")
    return tmp_path


def profile() -> Profile:
    return read_table("t.json", Roofline(PRESETS["V100-32GB"], "float16"), (2, 4))


def as_json(argv: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints; nothing but JSON may be on stdout."""
    assert main(["partition", *argv.split()]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def partition_of(record: dict[str, Any]) -> Partition:
    placement = make_placement(
        record["placement"],
        record["num_devices"],
        len(record["stages"]) // record["num_devices"],
    )
    assert list(placement.device_of_stage) == record["device_of_stage"]
    cuts = [0]
    for names in record["stages"]:
        cuts.append(cuts[-1] + len(names))
    return Partition(placement, tuple(cuts))


@pytest.mark.parametrize("mode", ["exact", "soft", "sequential", "interleaved"])
@pytest.mark.parametrize("objective", ["load", "stage"])
def test_partition_json_agrees_with_the_planner(
    mode: str, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"--profile p.json -p 3 --mode {mode} --objective {objective} --lambda 0.5 --json -"
    record = as_json(argv, capsys)
    costs = profile().at(2)
    partition = partition_of(record)
    assert [name for stage in record["stages"] for name in stage] == list(costs.names)
    rule = MemoryRule(32e9, 16, in_flight(partition.placement, 6))
    found = evaluate(costs, partition, LINK, 0.5, rule)
    moved = volume(costs, partition)
    assert record["load_s"] == pytest.approx(found.load_s)
    assert record["memory_bytes"] == pytest.approx(found.memory_bytes, abs=1)
    assert record["bytes_per_microbatch"] == {"boundary": moved.boundary, "skip": moved.skip}
    value = max(found.load_s if objective == "load" else found.stage_s)
    assert record["objective_value"] == pytest.approx(value)
    assert record["objective"] == objective and record["seconds"] >= 0
    assert record["micro_batch_size"] == 2 and not record["extrapolated"]
    if mode == "exact":
        assert moved.skip == 0


def test_partition_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Folded and soft with skips, sequential without; the best by load."""
    record = as_json("--profile p.json -p 4 --json", capsys)
    assert record["layout"] == "fold soft" and record["memory_limit_bytes"] == 32e9
    best = find_partition(profile().at(2), fold(4), Goal(link=LINK))
    assert partition_of(record) == best
    plain = "--from-table plain.json --preset H100 -p 4 --json"
    record = as_json(plain, capsys)
    assert record["placement"] == "sequential" and record["micro_batch_size"] == 1
    assert as_json("--profile p.json -p 1 --json", capsys)["device_of_stage"] == [0]


def test_partition_compares_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    record = as_json("--profile p.json -p 3 --compare --json -", capsys)
    rows = {row["layout"]: row for row in record["comparison"]}
    assert list(rows) == [
        "sequential relay",
        "sequential",
        "interleaved relay",
        "interleaved",
        "fold exact",
        "fold soft",
    ]
    assert all(row["total"] == row["boundary"] + row["skip"] for row in rows.values())
    assert all(0 < row["hottest_device"] <= row["total"] for row in rows.values())
    assert rows["fold exact"]["skip"] == 0
    for one, other in (
        ("sequential", "sequential relay"),
        ("interleaved", "interleaved relay"),
        ("fold exact", "sequential"),
    ):
        assert rows[one]["skip"] < rows[other]["skip"]
        assert rows[one]["total"] < rows[other]["total"]
    soft, exact = rows["fold soft"], rows["fold exact"]
    assert soft["largest_load_s"] <= exact["largest_load_s"]
    assert soft["largest_load_s"] == record["objective_value"]


def test_partition_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("partition --profile p.json -p 2 --micro-batch-size 8 --compare".split()) == 0
    out = capsys.readouterr().out
    for text in (
        "small-u: 16 layers, 7 skips; fold soft on 2 device(s), smallest load",
        "note: the profile is of microbatches of 2, 4; 8 is extrapolated",
        "0: u0 ... ",
        "balance ",
        "samples/s",
        "hottest device",
        "of 32 GB",
        "interleaved relay",
    ):
        assert text in out
    devices = [line for line in out.splitlines() if line.strip().startswith(("0 ", "1 "))]
    assert len(devices) == 2


def test_partition_obeys_a_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    free = as_json("--profile p.json -p 2 --no-memory --json", capsys)
    assert free["memory_limit_bytes"] is None
    most = max(free["memory_bytes"])
    tight = as_json(f"--profile p.json -p 2 --memory-gb {0.97 * most / 1e9} --json", capsys)
    assert max(tight["memory_bytes"]) <= 0.97 * most
    assert tight["objective_value"] > free["objective_value"]
    assert main(f"partition --profile p.json -p 2 --memory-gb {0.3 * most / 1e9}".split()) == 2
    assert "no legal cut over 2 devices fits into" in capsys.readouterr().err


def test_partition_options_reduce_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Sharding, recomputation and fewer microbatches each take less."""
    common = "--profile p.json -p 2 --mode exact --no-memory --json"
    most = as_json(common, capsys)
    for flags in (
        "--data-parallel 4 --distributed-optimizer",
        "--microbatches 1",
        "--bytes-per-parameter 6",
        "--recompute",
    ):
        less = as_json(f"{common} {flags}", capsys)
        assert max(less["memory_bytes"]) < max(most["memory_bytes"])
        assert less["recompute"] == (flags == "--recompute")
    assert sum(as_json(f"{common} --recompute", capsys)["compute_s"]) > sum(most["compute_s"])


def test_partition_compare_explains_infeasible_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen layers are enough for nine devices in a row, but not folded."""
    argv = "--profile p.json -p 9 --mode sequential --compare"
    record = as_json(f"{argv} --json", capsys)
    rows = {row["layout"]: row for row in record["comparison"]}
    assert "16 layers are too few for 18 stages" in rows["fold exact"]["infeasible"]
    assert "total" not in rows["fold soft"] and rows["sequential relay"]["total"] > 0
    assert main(["partition", *argv.split()]) == 0
    assert re.search("fold exact: 16 layers are too few", capsys.readouterr().out)


def test_partition_writes_json_and_drawing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "partition --profile p.json -p 4 --json new/out.json --draw new/out.svg"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    assert "written to new/out.json" in out and "drawn to new/out.svg" in out
    record = json.loads((here / "new/out.json").read_text())
    svg = ElementTree.parse(here / "new/out.svg").getroot()
    classes = [element.get("class", "").split() for element in svg.iter()]
    assert sum("unit" in names for names in classes) == len(WORK)
    assert sum("skip" in names for names in classes) == 7
    text = "".join(svg.itertext())
    assert f"small-u: fold soft on P = 4, balance {record['balance']:.2f}" in text


CASES = {
    "everything": (
        "--from-table x.json -p 0 --micro-batch-size 0 --microbatches 0 --data-parallel 0 "
        "--bandwidth-gbs 0 --latency-us -1 --lambda nan --memory-gb -2 --mode soft --num-chunks 3 "
        "--bytes-per-parameter 0 --distributed-optimizer --json out.txt --draw out.png",
        [
            "15 faults",
            "x.json: there is no such file",
            "--preset: V100-32GB",
            "--num-devices is 0",
            "--micro-batch-size is 0",
            "--microbatches is 0",
            "--data-parallel is 0",
            "--bandwidth-gbs is 0",
            "--latency-us is -1",
            "--lambda is nan",
            "--memory-gb is -2",
            "a device of fold hosts 2, 4, ... stage(s)",
            "--bytes-per-parameter is 0",
            "give either --bytes-per-parameter or --distributed-optimizer",
            "must end in .json",
            "must end in .svg",
        ],
    ),
    "preset of a profile": ("--profile p.json -p 2 --preset H100", ["--preset is for"]),
    "unknown preset": ("--from-table t.json -p 2 --preset TPU", ["'TPU'; there are: V100"]),
    "chunks of a row": (
        "--profile p.json -p 2 --mode sequential --num-chunks 2",
        ["a device of sequential hosts 1 stage(s)"],
    ),
    "chunks without skips": (
        "--from-table plain.json --preset H100 -p 2 --num-chunks 2",
        ["give --mode interleaved"],
    ),
    "one chunk": ("--profile p.json -p 2 --num-chunks 1", ["a device of fold hosts 2, 4, ..."]),
    "no table": (
        "--from-table p.json -p 2 --preset H100",
        ["p.json: this is a profile, not a layer table"],
    ),
    "a folder": ("--profile . -p 2", ["--profile . is a folder; name a file in it"]),
    "a long name": (f"--profile {'x' * 300}.json -p 2", ["xx...: the name is too long; give"]),
    "no profile": ("--profile t.json -p 2", ["t.json: this is a layer table, not a profile"]),
    "too many devices": ("--profile p.json -p 9", ["16 layers are too few for 18 stages"]),
    "exact": (
        "--from-table parallel.json --preset H100 -p 3 --mode exact",
        ["no cut into 6 stages on 3 devices", "each of the 8 skips", "let skips travel"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_partition_refuses_bad_input(case: str, refused: Refused) -> None:
    argv, expected = CASES[case]
    refused(["partition", *argv.split()], *expected)
