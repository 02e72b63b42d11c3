"""``pulse verify`` and what ``pulse show`` says of its certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.cli.main import main
from megatron_pulse.planner.plan_file.plan_file import save_plan
from model_specs import allow, load_backbone
from tests.cli.conftest import Refused
from tests.plans import small_plan


def test_verify_of_a_module_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_profiling()
    from tests.integration.verified import MODULE, plan_for

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    allow("mine.py:build")
    backbone = load_backbone("mine.py:build", {"dtype": "float32"})
    save_plan(plan_for(backbone, pipeline=1), "plan.json")
    verify = ["verify", "plan.json", "--module", "mine.py:build", "--data", "digits8"]
    assert main([*verify, "--by-stages", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["result"] == "equal to the bit" and found["by_stages"]
    assert {row["result"] for row in found["layers"]} == {"equal to the bit"}
    assert found["data"] == "digits8" and found["microbatches"] == 3

    assert main(["show", "plan.json"]) == 0
    assert "verified (plan.verified.json): equal to the bit: mine.py:build" in (
        capsys.readouterr().out
    )
    path = tmp_path / "other.json"
    record = json.loads(Path("plan.verified.json").read_text())
    del record["xxh3_128"]
    path.write_text(json.dumps({**record, "versions": {"torch": "0.1"}}))
    assert main(["show", "plan.json", "--verified", "other.json"]) == 0
    assert "made with torch 0.1, here is" in capsys.readouterr().out
    save_plan(plan_for(backbone, pipeline=1, microbatches=4), "plan.json")
    assert main(["show", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "verified: not valid: plan.verified.json is of a plan that runs differently" in said
    assert "equal to the bit" not in said


def test_verify_refuses_bad_input(planned: Path, refused: Refused) -> None:
    refused(
        ["verify", "plan.json", "--backbone", "uvit-s"], "is a plan of uvit-tiny, not of uvit-s"
    )
    refused(
        ["verify", "plan.json", "--backbone", "uvit-tiny", "--option", "depth=6"],
        "not of uvit-tiny with these options",
    )
    refused(
        [*"verify plan.json --option depth=6 --steps 0 --timeout-s 0 -o plan.json".split()],
        "--option is for --backbone", "--steps is 0", "--timeout-s is 0", "would replace what is",
    )  # fmt: skip
    refused(["verify", "profile.json"], "this is a profile, not a plan")
    refused(
        ["show", "plan.json", "--verified", "profile.json"], "not a certificate of 'pulse verify'"
    )
    refused(["verify", "plan.json", "--device", "cuda"], "the plan has 4 ranks, and torch finds 0")
    refused(["verify", "plan.json", "--timeout-s", "0.01"], "reached the time limit (0.01 s")


def test_verify_prints_errors_of_ranks(
    planned: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that cannot begin end the command, with their last line."""
    from megatron_pulse.integration.verify import launcher

    failing = ("/bin/sh", "-c", "echo no memory; exit 3")
    monkeypatch.setattr(launcher, "RANK", failing)
    save_plan(small_plan(pipeline=1), "plan.json")
    refused(["verify", "plan.json", "--steps", "1"], "cannot run a step", "rank 0: no memory")
