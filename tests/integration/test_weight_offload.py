"""Frozen weights in host memory in whole runs: the same numbers, by flags and by a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.runs import STEPS, TINY, assert_same, pipeline, run
from tests.integration.test_adapters import ADAPTER, flags, make_place
from tests.integration.test_bad_input import refuse
from tests.ranks import RanksFailed

HOST = ["--pulse-offload-weights", "*"]
FAMILY = [*STEPS, "--pulse-adapter", "lora", "--pulse-adapter-target", "qkv", "--bf16"]
CLUSTER = """\
name: two
nodes: 1
devices_per_node: 2
memory_gb: 16
device: A100-40GB
links:
  intra_node: {kind: nvlink, bandwidth_gbs: 100, latency_us: 5, shared: device}
  host: {kind: pcie, bandwidth_gbs: 10, latency_us: 5, shared: device}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("host"))


def test_a_quantised_base_on_the_host_resumes_without(place: Path, tmp_path: Path) -> None:
    given = [*ADAPTER, "--pulse-quantization", "nf4", "--bf16"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    expected = run(1, *flags(place, *given), backbone="none")
    got = run(2, *flags(place, *given, *HOST, *save, *pipeline(2)), backbone="none")
    assert_same(got, expected)
    rest = ["--load", str(tmp_path / "run"), "--ckpt-step", "1"]
    resumed = run(1, *flags(place, *given, *HOST, *rest), backbone="none")
    assert resumed.losses == expected.losses[1:]
    assert all(torch.equal(resumed.weights[name], expected.weights[name]) for name in got.weights)


def test_a_family_by_flags_and_by_a_plan(tmp_path: Path) -> None:
    expected = run(1, *FAMILY)
    again = ["--recompute-granularity", "full"]
    assert_same(run(2, *FAMILY, *HOST, *again, *pipeline(2)), expected)
    plan = tmp_path / "plan.json"
    (tmp_path / "two.yaml").write_text(CLUSTER)
    words = ["tune", "--backbone", "uvit-tiny", "--cluster", str(tmp_path / "two.yaml")]
    words += [flag.replace("pulse-", "") for flag in TINY["uvit"][2:]]
    words += ["--adapter", "lora", "--adapter-target", "qkv", "--dtype", "bfloat16"]
    words += ["--global-batch-size", "8", "--micro-batch-size", "2", "--pipeline", "2"]
    words += ["--offload-weights", "in_blocks.*", "--seconds", "1", "--solver", "none"]
    assert main([*words, "-o", str(plan)]) == 0
    names = [layer.name for layer in load_checked(plan).profile.layers if layer.offloaded]
    assert names and all(name.startswith("in_blocks.") for name in names)
    assert_same(run(2, *FAMILY, "--pulse-plan", str(plan)), expected)


def test_what_cannot_be_offloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = refuse(monkeypatch, 1, HOST)
    assert "--pulse-offload-weights: *: the matching layers have no frozen weights" in str(fault)
    adapter = ["--pulse-adapter", "lora", "--pulse-adapter-target", "qkv", *HOST]
    with pytest.raises(RanksFailed, match="layers 1-15 offload their weights, and offload or"):
        run(1, *STEPS, *adapter, "--pulse-offload", "*", backbone="uvit")
