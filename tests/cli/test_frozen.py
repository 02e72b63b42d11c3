"""``--train`` and ``--freeze``: profiles, plans and checks of a model that is trained in part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import save_cluster
from megatron_pulse.profile.files import load_profile
from tests.planner.tune.problems import cluster
from tests.reference import unsealed_record

MODEL = ["--backbone", "uvit-tiny", "--option", "depth=8"]
HALF = ["--freeze", "embed.*", "--freeze", "in_blocks.*"]


def test_frozen_layers_from_profile_to_checked_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_cluster(cluster(1, 4), "c.yaml")
    sizes = ["--micro-batch-size", "2", "--preset", "V100-32GB"]
    assert main(["profile", *MODEL, *sizes, "-o", "whole.json"]) == 0
    assert main(["profile", *MODEL, *HALF, *sizes, "-o", "half.json"]) == 0
    whole, half = load_profile("whole.json"), load_profile("half.json")
    assert half.backbone["freeze"] == ["embed.*", "in_blocks.*"]
    for i, (layer, before) in enumerate(zip(half.layers, whole.layers, strict=True)):
        frozen = layer.name.startswith(("embed", "in_blocks."))
        assert layer.frozen_parameters == frozen * layer.parameters
        times, all_times = half.at(2), whole.at(2)
        assert times.forward_s[i] == all_times.forward_s[i]
        expected = 0 if frozen else before.parameters
        assert times.trained_parameters[i] == expected
        assert times.backward_s[i] == 0 if frozen else times.backward_s[i] > 0
        if layer.name == "in_blocks.1.mlp":  # not what is skipped, and waits for its place
            assert times.saved_bytes[i] == 0 < all_times.saved_bytes[i]
            assert half.at(2, half.all_layers(ActivationPolicy.RECOMPUTE)).saved_bytes[i] == 0
    asked = ["--cluster", "c.yaml", "--global-batch-size", "16", "--seconds", "60"]
    only = [
        "--layouts",
        "fold exact",
        "--no-recompute",
        "--no-split-backward",
        "--pipeline",
        "4",
        "--solver",
        "none",
        "--micro-batch-size",
        "2",
        "--tensor",
        "1",
    ]
    assert main(["tune", "--profile", "half.json", *asked, *only, "-o", "half-plan.json"]) == 0
    assert main(["tune", "--profile", "whole.json", *asked, *only, "-o", "plan.json"]) == 0
    plan, other = (unsealed_record(name) for name in ("half-plan.json", "plan.json"))
    assert plan["predicted"]["step_s"] < 0.9 * other["predicted"]["step_s"]
    assert max(plan["predicted"]["memory_bytes"]) < max(other["predicted"]["memory_bytes"])
    assert main(["check", "half-plan.json"]) == 0
    plan["backbone"].pop("freeze")
    plan["profile"]["backbone"].pop("freeze")
    Path("half-plan.json").write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["check", "half-plan.json"]) == 2
    assert "the plan's backbone freezes nothing" in capsys.readouterr().err


def test_frozen_patterns_without_match_suggest_names(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["profile", *MODEL, "--preset", "V100-32GB", "--freeze", "in_block.0.*"]
    assert main([*asked, "--train", "hed.weight", "-o", "p.json"]) == 2
    error = capsys.readouterr().err
    assert "'in_block.0.*'" in error and "'hed.weight'" in error and "did you mean" in error
