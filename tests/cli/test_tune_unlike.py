"""``pulse tune``, ``show`` and ``check`` on a box of unlike devices, and what they refuse there."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.profile import Source
from tests.planner.tune.problems import profile

FAST = "--global-batch-size 8 --seconds 0.7 --solver none --no-fsdp --micro-batch-size 1,2"
FIGURES = {"tflops": 10, "bandwidth_gbs": 500}
BOX = {
    "name": "box",
    "kinds": {
        "large": {"device": FIGURES, "memory_gb": 4.2},
        "small": {"device": FIGURES, "memory_gb": 2.8},
    },
    "devices_per_node": 2,
    "nodes": [{"devices": ["small", "large"]}],
    "links": {
        "intra_node": {"kind": "pcie", "bandwidth_gbs": 50, "latency_us": 5, "shared": "device"}
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_profile(profile(random.Random(0), 12, 5), "p.json")
    Path("box.yaml").write_text(json.dumps(BOX))
    return tmp_path


def test_plan_names_the_kind_of_each_device(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"tune --profile p.json --cluster box.yaml {FAST} --explain --json t.json -o plan.json"
    assert main(asked.split()) == 0
    text = capsys.readouterr().out
    plan = load_checked("plan.json")
    kinds = [place.name for place in plan.places]
    assert sorted(kinds) == ["large", "small"]
    assert f"devices {', '.join(kinds)}" in text and "at most 24 orders of the devices" in text
    outcome = json.loads(Path("t.json").read_text())["outcomes"][0]
    assert outcome["devices"] == [[kind] for kind in kinds]
    limits = {"large": 4.2e9, "small": 2.8e9}
    assert all(n <= limits[kind] for n, kind in zip(outcome["memory_bytes"], kinds, strict=True))
    assert main("show plan.json -o plan.html".split()) == 0
    shown, page = capsys.readouterr().out, Path("plan.html").read_text()
    for device, kind in enumerate(kinds):
        assert f"\n{device} {kind} " in shown
        assert f"<td>device {device} {kind}</td>" in page
        assert f">{kind}</text>" in page
    assert "1 small, 1 large" in shown
    assert main("show plan.json -o plan.svg".split()) == 0
    assert all(f">{kind}</text>" in Path("plan.svg").read_text() for kind in kinds)


def test_costs_of_each_kind_are_its_files_or_of_its_peaks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {
        "large": {"device": "A100-80GB", "memory_gb": 24, "usable_memory": 0.9},
        "small": {"device": "V100-32GB", "memory_gb": 16, "usable_memory": 0.9},
    }
    Path("box.yaml").write_text(json.dumps({**BOX, "kinds": kinds}))
    asked = f"tune --backbone uvit-tiny --cluster box.yaml {FAST} --pipeline 2 -o plan.json"
    assert main(asked.split()) == 0
    plan = load_checked("plan.json")
    size = plan.micro_batch_size
    whole = {
        name: sum(row.whole_s for row in kind.times[size])
        for name, kind in plan.profile.kinds.items()
    }
    assert whole["small"] > whole["large"]
    assert plan.dtype == "float16", "V100s have no bfloat16"
    for name in kinds:
        save_profile(plan.profile.of_kind(name), f"{name}.json")
    measured = {name: {**kind, "device": f"{name}.json"} for name, kind in kinds.items()}
    Path("box.yaml").write_text(json.dumps({**BOX, "kinds": measured}))
    assert main(asked.replace("1,2", str(size)).split()) == 0
    assert load_checked("plan.json").profile.kinds == plan.profile.kinds
    capsys.readouterr()
    assert main(asked.replace("uvit-tiny", "unet-tiny").split()) == 2
    assert "kinds.large: its profile is of uvit-tiny with other" in capsys.readouterr().err


def test_a_file_may_stand_beside_peaks(here: Path) -> None:
    """Peaks are costed at the file's sizes; bytes are the largest of both."""
    of = "--backbone uvit-tiny --dtype float32"
    figures = "--peak-tflops 80 --bandwidth-gbs 500 --memory-gb 16"
    assert main(f"profile {of} --micro-batch-size 1,2 {figures} -o small.json".split()) == 0
    kinds = {
        "large": {"device": {"tflops": 160, "bandwidth_gbs": 1000}, "memory_gb": 24},
        "small": {"device": "small.json", "memory_gb": 16},
    }
    Path("box.yaml").write_text(json.dumps({**BOX, "kinds": kinds}))
    asked = f"tune {of} --cluster box.yaml {FAST} --pipeline 2 -o plan.json".split()
    assert main(asked) == 0
    own = load_profile("small.json")
    more = {
        size: tuple(replace(row, saved_bytes=row.saved_bytes + 24) for row in rows)
        for size, rows in own.times.items()
    }
    save_profile(replace(own, source=Source.MEASURED, times=more), "small.json")
    assert main(asked) == 0
    plan = load_checked("plan.json")
    large, small = (plan.profile.kinds[name].times[plan.micro_batch_size] for name in kinds)
    rows = more[plan.micro_batch_size]
    assert [r.saved_bytes for r in large] == [r.saved_bytes for r in rows]
    assert [r.whole_s for r in small] == [r.whole_s for r in rows] > [r.whole_s for r in large]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--profile p.json", "--profile is of one device, and box has 2 kinds"),
        ("--profile p.json --world-sizes 1", "nobody knows which are left"),
    ],
)
def test_what_needs_one_kind_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    other = {**BOX["kinds"], "small": {"device": "V100-32GB", "memory_gb": 2.8}}
    Path("box.yaml").write_text(json.dumps({**BOX, "kinds": other}))
    output = "plans" if "world" in flags else "plan.json"
    assert main(f"tune {flags} --cluster box.yaml {FAST} -o {output}".split()) == 2
    assert said in capsys.readouterr().err
    assert not Path(output).exists()


def test_a_number_of_nodes_needs_equal_nodes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = {**BOX["links"], "inter_node": BOX["links"]["intra_node"]}
    Path("box.yaml").write_text(json.dumps({**BOX, "links": links}))
    assert main("clusters box.yaml:3".split()) == 0
    assert "count: 3" in capsys.readouterr().out
    nodes = [*BOX["nodes"], {"kind": "small"}]
    Path("box.yaml").write_text(json.dumps({**BOX, "links": links, "nodes": nodes}))
    assert main("clusters box.yaml:3".split()) == 2
    assert "its nodes have unlike devices" in capsys.readouterr().err
