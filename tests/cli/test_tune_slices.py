"""``pulse tune`` with costs in slices of tokens: taken where memory is short, and shown."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import save_cluster
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.files import save_profile
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile

TUNE = "tune --profile p.json --cluster c.yaml --global-batch-size 16 --seconds 0.7 --solver none"


def _times(costs: Profile, memory: float, time: float = 1.0) -> Profile:
    return replace(
        costs,
        times={
            size: tuple(
                replace(
                    layer,
                    input_grad_s=time * layer.input_grad_s,
                    saved_bytes=round(memory * layer.saved_bytes),
                    peak_bytes=round(memory * layer.peak_bytes) + round(memory * 1e6),
                )
                for layer in layers
            )
            for size, layers in costs.times.items()
        },
    )


@pytest.mark.parametrize("is_short", [True, False])
def test_slices_are_taken_where_memory_is_short(
    is_short: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    costs = profile(random.Random(0), 12, 5)
    whole = _times(costs, 1e5 if is_short else 1.0)
    save_profile(replace(whole, sliced={4: _times(costs, 0.5, 1.5).times}), "p.json")
    save_cluster(cluster(1, 4), "c.yaml")
    assert main(f"{TUNE} -o plan.json".split()) == 0
    plan, said = load_checked(tmp_path / "plan.json"), capsys.readouterr().out
    assert main("show plan.json".split()) == 0
    shown = capsys.readouterr().out
    if not is_short:
        assert plan.token_slices == 1 and "slices" not in said + shown
        return
    assert plan.token_slices == 4 and ", 4 slices of tokens" in said
    assert "--pulse-token-slices 4" in equivalent_flags(plan)
    assert "in 4 slices: a layer takes at most" in shown
