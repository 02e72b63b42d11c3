"""``pulse check``, ``show`` and ``compare``: true figures, true pictures, refusals in full."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.files import HASH
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.trace.trace import save_trace
from megatron_pulse.profile.files import save_profile
from tests.cli.conftest import Refused, of_class
from tests.plans import small_plan, small_profile, trace_of, with_other_parameters
from tests.reference import unsealed_record


@pytest.fixture(autouse=True)
def here(planned: Path) -> Path:
    return planned


def as_json(argv: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*argv.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("kind", "split", "pipeline"),
    [("fold", True, 2), ("fold", False, 4), ("sequential", False, 3), ("sequential", False, 1)],
)
def test_check_reports_each_check(
    kind: str, split: bool, pipeline: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small_plan(kind, split, pipeline)
    machines = {**plan.provenance["cluster"], "devices_per_node": plan.world_size}
    save_plan(replace(plan, provenance={**plan.provenance, "cluster": machines}), "a.json")
    record = as_json("check a.json", capsys)
    assert record["can_run"] and record["faults"] == []
    checked = record["checked"]
    assert list(checked) == "form schedule backbone skips messages figures ranks memory".split()
    operations = len(plan.stages) * plan.num_microbatches * (3 if split else 2)
    assert f"{operations} operations" in checked["schedule"]
    home = plan.partition.device_of_layer
    stay = [home(skip.source) == home(skip.destination) for skip in small_profile().skips]
    numbers = [int(word) for word in checked["skips"].split() if word.isdigit()]
    assert (numbers[0], sum(numbers[1:])) == (sum(stay), stay.count(False))
    assert all(stay) == (kind == "fold" or pipeline == 1)
    at_least = 2 * plan.num_microbatches * len(plan.edges)
    assert int(checked["messages"].split()[0]) >= at_least
    if pipeline == 1:
        assert checked["messages"].startswith("0 ")
    assert main(["check", "a.json"]) == 0
    out = capsys.readouterr().out
    assert "it can run: --pulse-plan a.json" in out and all(text in out for text in checked)


def test_check_reports_a_missing_checksum(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = here / "a.json"
    save_plan(small_plan("fold", True, 2), path)
    path.write_text("".join(line for line in path.open() if HASH not in line))
    assert f"without its line {HASH!r}" in as_json("check a.json", capsys)["checked"]["form"]


def change(plan: PlanFile, **changes: Any) -> PlanFile:
    return replace(plan, **changes)


def moved(plan: PlanFile) -> PlanFile:
    """Two layers have changed places."""
    first, second, *rest = plan.stages
    return change(plan, stages=((*first[:-1], second[0]), (first[-1], *second[1:]), *rest))


def with_options(plan: PlanFile, **options: Any) -> PlanFile:
    known = plan.backbone["options"]
    return change(plan, backbone={**plan.backbone, "options": {**known, **options}})


def crowded(plan: PlanFile) -> PlanFile:
    """Memory that is not there, on machines that are too few; and another backbone."""
    small = {**plan.provenance["cluster"], "devices_per_node": 2, "memory_gb": 1}
    return change(
        with_options(plan, depth=6),
        predicted={**plan.predicted, "memory_bytes": [3e9, 1e6]},
        provenance={**plan.provenance, "cluster": small},
    )


def illegal(plan: PlanFile) -> PlanFile:
    order = (plan.schedule.order[0][1:], plan.schedule.order[1])
    return change(crowded(plan), schedule=replace(plan.schedule, order=order))


BROKEN: dict[str, tuple[Callable[[PlanFile], PlanFile], list[str]]] = {
    "places": (moved, ["stages: layer", "(in stage 0); uvit-tiny has"]),
    "other options": (lambda p: with_options(p, depth=10), ["uvit-tiny has"]),
    "unknown": (
        lambda p: change(p, backbone={"name": "uvit-tinny", "options": {}}),
        ["no backbone is called 'uvit-tinny'; did you mean uvit-tiny"],
    ),
    "family": (
        lambda p: change(p, backbone={**p.backbone, "family": "dit"}),
        ["backbone: uvit-tiny belongs to the family uvit, not 'dit'"],
    ),
    "bad options": (lambda p: with_options(p, colour=1), ["backbone: ", "colour"]),
    "machines": (
        crowded,
        [
            "3 faults",
            "uvit-tiny has",
            "the plan is for 4 ranks; cpu has 2",
            "memory: device 0 needs 3 GB of 0.8 GB",
        ],
    ),
    "illegal too": (
        illegal,
        ["F0:0 is missing on device 0", "the plan is for 4 ranks", "device 0 needs 3 GB"],
    ),
    "shape": (
        lambda p: change(
            crowded(p), predicted={**crowded(p).predicted, "memory_bytes": [3e9, 1e6, 1e6]}
        ),
        ["predicted.memory_bytes: 3 values for 2 device(s)", "the plan is for 4 ranks; cpu has 2"],
    ),
    "cluster": (
        lambda p: change(p, provenance={**p.provenance, "cluster": {"name": "x"}}),
        ["provenance.cluster", "nodes"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_check_lists_every_fault(
    case: str, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking, expected = BROKEN[case]
    save_plan(breaking(small_plan()), "bad.json")
    err = refused(["check", "bad.json"], *expected, "make the plan anew with 'pulse tune'")
    assert main(["check", "bad.json", "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert not record["can_run"] and record["faults"]
    said = [line.strip() for fault in record["faults"] for line in fault.splitlines()]
    assert all(line in err for line in said)


def test_activation_policies_unknown_or_of_unknown_layers_have_no_consequences(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = unsealed_record(here / "plan.json")
    layer = record["stages"][0][1]
    record["activations"] = {layer: "twice", "in_blocks.0.mlp": "recompute"}
    (here / "bad.json").write_text(json.dumps(record))
    assert main(["check", "bad.json", "--json"]) == 2
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert f"activations.{layer}" in fault and "'twice'" in fault
    record["activations"] = {layer: "recompute", "in_blocks.0.mpl": "recompute"}
    (here / "bad.json").write_text(json.dumps(record))
    assert main(["check", "bad.json", "--json"]) == 2
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault.startswith("activations: no stage has a layer 'in_blocks.0.mpl'; did you mean")


def test_check_lists_faults_of_form(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = unsealed_record(here / "plan.json")
    del record["tensor"]
    record["data"] = 0
    (here / "bad.json").write_text(json.dumps(record))
    assert main(["check", "bad.json"]) == 2
    err = capsys.readouterr().err
    assert "2 faults" in err and "tensor is missing" in err and "data is 0" in err
    (here / "bad.json").write_text("{")
    for command in ("check", "show"):
        assert main([command, "bad.json"]) == 2
        assert "bad.json cannot be read as a plan" in capsys.readouterr().err


def test_check_counts_parameters_on_request(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(small_plan(), "a.json")
    save_plan(with_other_parameters(small_plan()), "b.json")
    held = sum(layer.parameters for layer in small_profile().layers)
    assert (
        f"in order; {held:,} parameters"
        in as_json("check a.json --count", capsys)["checked"]["backbone"]
    )
    assert main(["check", "b.json"]) == 0
    assert "parameters" not in capsys.readouterr().out
    assert main(["check", "b.json", "--count"]) == 2
    said = "profile.layers.1.parameters is 2,096; 'in_blocks.0.attn' of uvit-tiny has 4,192"
    assert said in capsys.readouterr().err


def test_show_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "plan.json"]) == 0
    out = capsys.readouterr().out
    plan = small_plan()
    line = plan.simulate_step().timeline
    for text in (
        "uvit-tiny on 4 rank(s): pipeline 2 x data 2 x tensor 1, fold exact (4 stage(s))",
        "batch 16 = 2 replica(s) x 4 microbatch(es) of 2, float32",
        "neighbouring ranks are devices of one stage",
        f"{1e3 * line.busy[1]:.4g} ms",
        "constructive",
        "pulse run --nproc-per-node 4 launch/pretrain_diffusion.py --pulse-plan plan.json",
        "--pipeline-model-parallel-size 2",
        "--overlap-grad-reduce",
        "device  1 | ",
    ):
        assert text in out
    rows = [row for row in out.splitlines() if row.startswith("device  ") and "|" in row]
    assert sorted(op for row in rows for op in row.split() if ":" in op) == sorted(
        str(op) for order in plan.schedule.order for op in order
    )
    ranks = [row.split()[1] for row in out.splitlines() if row.strip()[:2] in ("0 ", "1 ")]
    assert ranks == ["0-1", "2-3"]
    save_plan(replace(plan, rank_order="tp-pp-dp"), "inside.json")
    assert main(["show", "inside.json"]) == 0
    out = capsys.readouterr().out
    assert "0, 2" in out and "1, 3" in out and "--use-tp-pp-dp-mapping" in out


def test_show_draws_operations_and_messages(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = small_plan(split=True)
    save_plan(plan, "split.json")
    replayed = plan.simulate_step()
    assert main("show split.json -o d/o.svg".split()) == 0
    assert "drawn to d/o.svg" in capsys.readouterr().out
    svg = ElementTree.parse(here / "d/o.svg").getroot()
    assert len(of_class(svg, "op")) == 3 * 4 * 4
    groups = of_class(svg, "lanes")
    marks = [mark for group in groups for mark in of_class(group, "mark")]
    assert len(marks) == len(replayed.transfers) == 2 * 2 * 4
    scale = (float(svg.get("width", "")) - 156 - 150) / replayed.timeline.makespan
    for mark, transfer in zip(marks, replayed.transfers, strict=True):
        assert float(mark.get("x", "")) == pytest.approx(156 + scale * transfer.start, abs=0.02)
        lasts = scale * (transfer.end - transfer.start)
        assert float(mark.get("width", "")) == pytest.approx(max(1.0, lasts), abs=0.02)
        hatched = mark.get("fill") == "url(#gradient)"
        assert hatched == (transfer.consumer.kind is not OpType.FORWARD)
        assert f"for {transfer.consumer}, device" in str(mark.findtext("{*}title"))
    text = "".join(svg.itertext())
    assert "sends gradients" in text and "waits for" not in text and "GB of activations" in text
    assert main("show split.json -o d/o.json".split()) == 0
    events = json.loads((here / "d/o.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == 3 * 4 * 4 + len(replayed.transfers)
    sent = [event for event in bars if event["tid"] >= 2]
    assert [event["ts"] for event in sent] == [
        pytest.approx(1e6 * transfer.start) for transfer in replayed.transfers
    ]


def test_show_writes_one_html_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("show plan.json -o o.html".split()) == 0
    page = (here / "o.html").read_text()
    assert "src=" not in page and "href=" not in page
    drawings = page.split("<svg")[1:]
    assert len(drawings) == 2
    cut, timeline = (
        ElementTree.fromstring("<svg" + text[: text.index("</svg>") + 6]) for text in drawings
    )
    assert len(of_class(cut, "unit")) == len(small_profile().layers)
    assert len(of_class(timeline, "op")) == 2 * 4 * 4
    held = max(json.loads((here / "plan.json").read_text())["predicted"]["memory_bytes"])
    for text in (
        "Memory",
        f"{held / 1e9:.3g} GB",
        "9.6 GB are usable",
        "0 to 1",
        "pulse run",
        "made up",
    ):
        assert text in page


FLAGS = {
    "show missing": ("show none.json", ["none.json cannot be read as a plan"]),
    "show": (
        "show plan.json -o o.png",
        ["must end in .svg, .html or .json"],
    ),
    "show over itself": (
        "show plan.json -o plan.json",
        ["would replace what is read"],
    ),
    "compare": (
        "compare plan.json none.json -o o.txt --profile none2.json",
        [
            "4 faults",
            "TRACE none.json: there is no such file",
            "--profile none2.json: there is no such file",
            "--profile and --write-profile: give both",
            "must end in .svg",
        ],
    ),
    "compare over its input": (
        "compare plan.json trace.json -o plan.json --profile profile.json --write-profile "
        "profile.json",
        [
            "2 faults",
            "--output plan.json would replace what is read",
            "--write-profile profile.json",
        ],
    ),
    "schedule over itself": (
        "schedule --profile profile.json -p 2 -m 2 --json same.json --draw same.json --csv "
        "profile.json",
        [
            "3 faults",
            "the file name must end in .csv",
            "--csv profile.json would replace what is read",
            "--json same.json is what --draw writes",
        ],
    ),
    "partition over itself": (
        "partition --profile profile.json -p 2 --json profile.json",
        ["--json profile.json would replace what is read"],
    ),
    "tune over itself": (
        "tune --profile profile.json --cluster cpu --global-batch-size 8 -o profile.json "
        "--json ./profile.json",
        [
            "3 faults",
            "--output profile.json would replace what is read",
            "--output profile.json is what --json writes",
        ],
    ),
    "compare no trace": (
        "compare plan.json profile.json",
        ["profile.json: this is a profile, not a trace: 'pulse tune"],
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_plan_commands_refuse_bad_flags(case: str, refused: Refused) -> None:
    plan = small_plan()
    save_trace(trace_of(plan, [plan.simulate_step().timeline]), "trace.json")
    argv, expected = FLAGS[case]
    refused(argv.split(), *expected)


def test_compare_refuses_a_profile_of_another_chain(capsys: pytest.CaptureFixture[str]) -> None:
    profile = small_profile()
    first, *rest = profile.layers
    renamed = replace(profile, layers=(replace(first, name="other"), *rest))
    save_profile(renamed, "other.json")
    plan = small_plan()
    save_trace(trace_of(plan, [plan.simulate_step().timeline]), "trace.json")
    argv = "compare plan.json trace.json --profile other.json --write-profile new.json"
    assert main(argv.split()) == 2
    assert "has other layers than uvit-tiny" in capsys.readouterr().err


def test_plan_commands_need_no_torch(here: Path) -> None:
    plan = small_plan()
    save_trace(trace_of(plan, [plan.simulate_step().timeline]), "trace.json")
    code = (
        "import sys; from megatron_pulse.cli.main import main; "
        "assert main(['check', 'plan.json']) == 0; "
        "assert main('show plan.json -o o.html'.split()) == 0; "
        "assert main('compare plan.json trace.json -o o.svg'.split()) == 0; "
        "assert main('partition --profile profile.json -p 2 --compare --draw p.svg'.split()) == 0; "
        "asked = 'schedule --profile profile.json -p 2 -m 2 --solver none --seconds 0.1'; "
        "assert main(asked.split()) == 0; "
        "assert main(['clusters', 'cpu']) == 0; "
        "assert not {'torch', 'megatron', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=200)


def test_show_quotes_its_command_for_the_shell() -> None:
    from megatron_pulse.integration.flags.parse import parse
    from megatron_pulse.planner.plan_file.equivalent_flags import run_command

    words = shlex.split(run_command(small_plan(), Path("my plans/plan.json")))
    script = words.index("launch/pretrain_diffusion.py")
    assert words[:2] == ["pulse", "run"]
    line = parse(words[script + 1 :])
    assert line.faults == () and line.args.pulse_plan == "my plans/plan.json"
    from torch.distributed.run import parse_args

    assert parse_args(words[2:]).nproc_per_node == str(small_plan().world_size)
    without = run_command(replace(small_plan(), ema=False), Path("plan.json"))
    assert " --pulse-ema-decay 0 " in without and "--pulse-ema-decay" not in shlex.join(words)
