"""``pulse schedule``: true figures, golden comparisons, refusals in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.cli.plan import schedule_report
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_activations
from megatron_pulse.planner.schedule.classic.one_f_one_b import gpipe, one_f_one_b
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.serialize import from_csv, to_csv
from megatron_pulse.profile.files import save_profile
from megatron_pulse.profile.profile_from_table import read_table
from megatron_pulse.profile.roofline import PRESETS, Roofline
from tests.cli.conftest import Refused
from tests.cli.test_partition import NESTED, table

KEYS = {"makespan", "lower_bound", "gap", "proved", "solver", "seconds", "peak", "order"}
FAST = "--solver none --seconds 0.5"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of times, a profile, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "kept"))
    ones = [1.0] * 8
    files: dict[str, Any] = {
        "equal": {"forward": ones, "input_grad": ones, "weight_grad": ones},
        "whole": {"forward": [1, 1.5, 1.2, 1], "backward": [2, 3, 2.5, 2], "link": [0.2, 0, 0.4]},
        "t": table(NESTED),
    }
    for name, record in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    save_profile(read_table("t.json", Roofline(PRESETS["V100-32GB"], "float16"), (2,)), "p.json")
    return tmp_path


def as_json(argv: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints; nothing but JSON may be on stdout."""
    assert main(["schedule", *argv.split(), "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def schedule_of(record: dict[str, Any], problem: ScheduleProblem) -> Schedule:
    order = tuple(tuple(Operation.parse(text) for text in row) for row in record["order"])
    return Schedule("read", problem.placement, problem.num_microbatches, order)


def whole_problem(cap: float = 4.0) -> ScheduleProblem:
    times = ((1, 1.5, 1.2, 1), (2, 3, 2.5, 2), None, (0.2, 0, 0.4))
    return ScheduleProblem(fold(2), 5, *times, cap=(cap,) * 2)


def test_schedule_json_agrees_with_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    record = as_json(f"--times whole.json -p 2 -m 5 --cap 3 {FAST}", capsys)
    assert set(record) == KEYS
    problem = whole_problem(cap=3.0)
    schedule = schedule_of(record, problem)
    assert not faults_for(problem, schedule)
    assert record["makespan"] == simulate(problem, schedule).makespan
    assert record["lower_bound"] >= lower_bound(problem)
    assert record["gap"] == pytest.approx(record["makespan"] / record["lower_bound"] - 1)
    assert record["peak"] == list(peak_activations(schedule)) and max(record["peak"]) <= 3
    assert record["proved"] == (record["gap"] < 1e-9) and record["seconds"] >= 0
    free = as_json(f"--times whole.json -p 2 -m 5 --cap none {FAST}", capsys)
    assert free["makespan"] <= record["makespan"]


def test_schedule_compare_is_golden(capsys: pytest.CaptureFixture[str]) -> None:
    """planner/schedule/README.md, Known optima: makespans and peaks at P = 4, M = 8."""
    record = as_json(f"--times equal.json -p 4 -m 8 --split --compare {FAST}", capsys)
    rows = {row["schedule"]: row for row in record["comparison"]}
    golden = {
        "gpipe": (66, 16),
        "1f1b": (66, 8),
        "interleaved": (57, 11),
        "zb-h1": (54, 8),
        "zb-v": (51, 8),
    }
    for name, (makespan, peak) in golden.items():
        assert (rows[name]["makespan"], rows[name]["peak"]) == (makespan, peak)
        assert rows[name]["fits"] == (peak <= 8)
        assert rows[name]["bubble"] == pytest.approx(1 - 48 / makespan)
        assert rows[name]["ratio"] == pytest.approx(makespan / 51)
    assert (record["makespan"], max(record["peak"]), record["proved"]) == (51, 8, True)


def test_schedule_compare_merges_neighbouring_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Uneven stages: 1F1B on pairs of neighbours, with the link that is left between them."""
    argv = f"--times whole.json -p 2 -m 5 --compare {FAST}"
    rows = {row["schedule"]: row for row in as_json(argv, capsys)["comparison"]}
    from megatron_pulse.planner.layout.placement import sequential

    merged = ScheduleProblem(sequential(2), 5, (2.5, 2.2), (5, 4.5), None, (0.0,))
    expected = simulate(merged, one_f_one_b(sequential(2), 5)).makespan
    assert rows["1f1b"]["makespan"] == pytest.approx(expected)
    assert rows["1f1b"]["peak"] == 4  # two microbatches of two stages
    assert "zb-v" not in rows  # weight gradients are not known
    assert rows["interleaved"]["placement"] == "interleaved"
    assert rows["hanayo"]["placement"] == "fold"
    assert rows["chimera"]["placement"] == "bidirectional"


def test_schedule_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"schedule --times equal.json -p 4 -m 2 --compare {FAST}".split()) == 0
    out = capsys.readouterr().out
    for text in ("fold of 8 stages on P = 4, M = 2", "makespan 28", "lower bound", "bubble"):
        assert text in out
    assert "device  3 | " in out and "F7:1" in out
    assert "1f1b " in out and "to ours" in out and "neighbouring stages" in out


@pytest.mark.parametrize("split", [False, True])
def test_schedule_of_a_profile(split: bool, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--split" if split else ""
    record = as_json(f"--profile p.json -p 2 -m 4 {flags} {FAST}", capsys)
    kinds = {text[0] for row in record["order"] for text in row}
    assert kinds == (set("FIW") if split else set("FB"))
    assert main("partition --profile p.json -p 2 --no-memory --json".split()) == 0
    partition = json.loads(capsys.readouterr().out)
    # No device can be done before it has computed all microbatches.
    assert record["makespan"] >= 4 * max(partition["compute_s"])
    assert record["makespan"] <= 4 * sum(partition["load_s"])
    assert main(f"schedule --profile p.json -p 2 -m 4 {flags} {FAST}".split()) == 0
    out = capsys.readouterr().out
    assert "small-u: " in out and " ms" in out and "samples/s" in out


def test_schedule_by_name_and_by_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A written order is read back and comes to the same; a named one is the table's row."""
    argv = f"schedule --times whole.json -p 2 -m 5 {FAST} --csv new/o.csv --json o.json"
    assert main(argv.split()) == 0
    capsys.readouterr()
    found = json.loads((here / "o.json").read_text())
    again = as_json("--times whole.json -p 2 -m 5 --schedule new/o.csv", capsys)
    assert again["order"] == found["order"] and again["makespan"] == found["makespan"]
    row = as_json(f"--times whole.json -p 4 -m 5 {FAST}", capsys)  # a stage for each device
    assert len(row["order"]) == 4
    named = as_json("--times equal.json -p 4 -m 8 --name zb-h1", capsys)
    assert (named["makespan"], max(named["peak"])) == (54, 8)
    assert {text[0] for text in named["order"][0]} == set("FIW")
    folded = as_json("--times whole.json -p 2 -m 5 --placement fold --name gpipe", capsys)
    problem = whole_problem(cap=10.0)
    assert folded["makespan"] == simulate(problem, gpipe(problem.placement, 5)).makespan


def test_schedule_recomputes_and_offloads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a row with room for 2.6 of 4 activations: with less to hold, on the host, or again."""
    row = {"forward": [1] * 4, "backward": [2] * 4}
    more: dict[str, dict[str, Any]] = {
        "kept": {},
        "away": {"offload_bytes": [0.8] * 4, "offload_s": [1] * 4},
        "again": {"backward": [3] * 4, "activation": [0.2] * 4, "recompute_s": [1] * 4},
        "apart": {"input_grad": [1] * 4, "weight_grad": [1] * 4, "wgrad_bytes": [0.1] * 4},
    }
    took, kinds = {}, {}
    for name, beside in more.items():
        (here / f"{name}.json").write_text(json.dumps(row | beside))
        argv = f"--times {name}.json -p 4 -m 12 --placement sequential --cap 2.6 --no-cache {FAST}"
        found = as_json(argv + " --split" * (name == "apart") + f" --csv {name}.csv", capsys)
        took[name] = found["makespan"]
        kinds[name] = {text[0] for order in found["order"] for text in order}
        argv = f"--times {name}.json -p 4 -m 12 --placement sequential --schedule {name}.csv"
        assert as_json(argv, capsys)["order"] == found["order"]
    assert (took["kept"], took["away"]) == (75, 45) and took["again"] < 75 and took["apart"] < 75
    assert kinds["away"] == set("FBOL") and kinds["apart"] == set("FIW")
    (here / "away.json").write_text(
        json.dumps(row | {"offload_bytes": [0.8] * 4, "wgrad_bytes": [1] * 4})
    )
    assert main("schedule --times away.json -p 4 -m 12 --placement sequential".split()) == 2
    assert "'wgrad_bytes' needs a split backward" in capsys.readouterr().err
    (here / "away.json").write_text(json.dumps(row | {"offload_bytes": [0.8] * 4}))
    assert main("schedule --times away.json -p 4 -m 12 --placement sequential".split()) == 2
    assert "given without offload_s" in capsys.readouterr().err


def test_schedule_cache_is_used_and_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"--times whole.json -p 2 -m 5 {FAST}"
    first = as_json(argv, capsys)
    second = as_json(argv, capsys)
    assert second["order"] == first["order"]
    assert second["solver"] == f"cache ({first['solver']})"
    assert as_json(f"{argv} --no-cache", capsys)["solver"] == first["solver"]
    (kept,) = (here / "kept").iterdir()
    kept.unlink()
    assert not as_json(argv, capsys)["solver"].startswith("cache")


def test_schedule_draws_svg_html_and_trace(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("svg", "html", "json"):
        argv = f"schedule --times whole.json -p 2 -m 5 --compare {FAST} --draw d/o.{suffix}"
        assert main(argv.split()) == 0
        assert f"drawn to d/o.{suffix}" in capsys.readouterr().out
    svg = ElementTree.parse(here / "d/o.svg").getroot()
    assert sum(element.get("class") == "op" for element in svg.iter()) == 2 * 4 * 5
    page = (here / "d/o.html").read_text()
    inner = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    assert sum(e.get("class") == "op" for e in ElementTree.fromstring(inner).iter()) == 2 * 4 * 5
    assert "<td>1f1b</td>" in page and "src=" not in page and "href=" not in page
    events = json.loads((here / "d/o.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 4 * 5


@pytest.mark.parametrize("command", ["schedule", "tune"])
def test_a_removed_solver_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--solver", "cp-sat"])
    assert "cp-sat is no longer one of the solvers; use highs" in capsys.readouterr().err


BAD_TIMES = {
    "forward": [1, 0, "x"],
    "input_grad": [1, 2],
    "colour": [],
    "link": [1, -1],
    "activation": [1, 1, 1, 1],
}
CASES = {
    "flags": (
        "--times x.json -p 0 -m 0 --waves 0 --placement sequential --micro-batch-size 0 --cap -1 "
        "--link-gbs 0 --link-us -1 --seconds nan --split --name 1f1b --draw o.png --csv o.txt "
        "--json o.txt --solver highs --no-cache",
        [
            "21 faults",
            "--json o.txt is what --csv writes",
            "x.json: there is no such file",
            "--num-devices is 0",
            "--microbatches is 0",
            "--waves is 0",
            "--waves: a device of sequential hosts one stage",
            "--micro-batch-size is 0",
            "--micro-batch-size is for --profile",
            "--cap is -1",
            "--link-gbs is 0",
            "--link-gbs is for --profile; write 'link'",
            "--link-us is -1",
            "--link-us is for --profile",
            "--seconds is nan; it must be finite, 0 or more",
            "--solver is for synthesized schedules",
            "--no-cache is for synthesized schedules",
            "--seconds is for synthesized schedules",
            "--split is for synthesized schedules",
            "must end in .svg, .html or .json",
            "must end in .csv",
            "must end in .json",
        ],
    ),
    "times": (
        "--times bad.json -p 2 -m 2",
        [
            "'colour' is unknown",
            "give 'backward', or 'input_grad' and 'weight_grad'",
            "'forward' has 0; values must be numbers above 0",
            "'input_grad' has 2 values; 3 stages need 3",
            "'activation' has 4 values; 3 stages need 3",
            "'link' has -1; values must be numbers 0 or more",
        ],
    ),
    "not times": (
        "--times order.csv -p 2 -m 2",
        ["order.csv cannot be read as a file of times: it is not JSON"],
    ),
    "a list": ("--times list.json -p 2 -m 2", ["expected an object"]),
    "stages": ("--times whole.json -p 3 -m 2", ["has 4 stages", "takes 6"]),
    "waves": ("--times equal.json -p 2 -m 2 --waves 1", ["has 8 stages", "takes 4"]),
    "loops": (
        "--times equal.json -p 2 -m 2 --placement interleaved --waves 1",
        ["has 8 stages", "takes 4"],
    ),
    "row": ("--times equal.json -p 2 -m 2 --placement sequential", ["takes 2"]),
    "no split": ("--times whole.json -p 2 -m 2 --split", ["are not known"]),
    "zb-v of whole": ("--times whole.json -p 2 -m 2 --name zb-v", ["zb-v", "weight gradients"]),
    "placement": (
        "--times whole.json -p 2 -m 2 --name 1f1b --placement fold",
        ["1f1b needs placement sequential"],
    ),
    "cap": ("--times whole.json -p 2 -m 2 --cap 1", ["device 0 holds 2", "its cap is 1"]),
    "own": (
        "--times whole.json -p 2 -m 2 --schedule order.csv",
        ["5 microbatches", "the problem 2"],
    ),
    "own with another number": (
        "--times whole.json -p 2 -m 5 --schedule typo.csv",
        ["typo.csv: F2:9 on device 1: there is no microbatch 9", "typo.csv: F2:0 is missing"],
    ),
    "own broken": (
        "--times whole.json -p 2 -m 5 --schedule broken.csv",
        ["F0:0 is missing", "device 1 runs B1:0 before F1:0"],
    ),
    "own over the cap": (
        "--times whole.json -p 2 -m 5 --schedule order.csv --cap 4",
        ["device 0 holds 10", "the cap is 4"],
    ),
    "unreadable": ("--times whole.json -p 2 -m 5 --schedule list.json", ["not an operation"]),
    "profile": ("--profile t.json -p 2 -m 2", ["t.json: this is a layer table, not a profile"]),
    "too many devices": ("--profile p.json -p 9 -m 2", ["16 layers are too few for 18 stages"]),
}


@pytest.mark.parametrize("case", CASES)
def test_schedule_refuses_bad_input(case: str, here: Path, refused: Refused) -> None:
    (here / "bad.json").write_text(json.dumps(BAD_TIMES))
    (here / "list.json").write_text("[1, 2]")
    order = to_csv(gpipe(fold(2), 5))
    assert from_csv(order).placement == fold(2)
    (here / "order.csv").write_text(order)
    broken = order.replace("0F0,", "").replace("1F0,", "").replace("1B0,", "1B0,1F0,")
    (here / "broken.csv").write_text(broken)
    (here / "typo.csv").write_text(order.replace("2F0,", "2F9,"))
    argv, expected = CASES[case]
    refused(["schedule", *argv.split()], *expected)


def test_grid_of_long_stages_has_orders_only(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers of microseconds: a column for each would be millions, also for --json."""
    times = {"forward": [2.5e6] * 4, "backward": [5e6] * 4}
    (here / "long.json").write_text(json.dumps(times))
    drawn: list[object] = []
    monkeypatch.setattr(schedule_report, "grid", lambda shown: drawn.append(shown) or "-")
    for flag in ("", "--json"):
        assert main(f"schedule --times long.json -p 2 -m 2 {flag} {FAST}".split()) == 0
    assert drawn and all(isinstance(shown, Schedule) for shown in drawn)
