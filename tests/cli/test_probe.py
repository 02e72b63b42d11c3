"""``pulse probe`` and ``pulse clusters`` from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.cli.measure.probe_command import job_of
from megatron_pulse.errors import UserError
from megatron_pulse.planner.cluster.cluster import cluster, cluster_presets
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the working directory, outside any job."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_probe_on_two_ranks_writes_one_file(here: Path) -> None:
    files = ["-o", str(here / "c.yaml"), "--json", str(here / "c.json")]
    argv = ["probe", *files, "--device", "H100", "--max-mb", "1", "--backend", "gloo"]
    assert run_ranks(2, main, argv) == [0, 0]
    found = cluster("c.yaml")
    assert (found.nodes, found.devices_per_node, found.device) == (1, 2, "H100")
    record = json.loads((here / "c.json").read_text())
    assert record["cluster"]["intra_node"]["bandwidth_gbs"] == found.intra_node.bandwidth_gbs
    assert len(record["pairs"][0]["median_s"]) == len(record["pairs"][0]["num_bytes"]) == 8
    text = (here / "c.yaml").read_text()
    assert "\n# Measured by 'pulse probe'" in text and "1 node(s), 2 rank(s)" in text
    assert sorted(path.name for path in here.iterdir()) == ["c.json", "c.yaml"]


def probe_of_unlike_ranks(argv: list[str]) -> int:
    """``pulse probe`` on ranks of one and of two threads."""
    torch.set_num_threads(1 + int(os.environ["RANK"]))
    return main(argv)


def test_probe_writes_the_kinds_of_unlike_ranks(here: Path) -> None:
    argv = ["probe", "-o", str(here / "c.yaml"), "--max-mb", "1", "--backend", "gloo"]
    assert run_ranks(2, probe_of_unlike_ranks, argv) == [0, 0]
    found = cluster("c.yaml")
    assert found.mixed and len(found.kinds) == 2
    text = (here / "c.yaml").read_text()
    assert all(f"\n# {kind.name}: rank(s) {i}.\n" in text for i, kind in enumerate(found.kinds))
    assert "Run 'pulse profile -o KIND.json' on a device of each kind" in text
    assert "\nkinds:\n" in text and "\nmemory_gb:" not in text


def test_probe_outside_a_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "-o", "c.yaml"]) == 2
    assert "start it with: torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_probe_on_one_rank_is_refused_with_all_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}
    for name, value in {**job, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    argv = ["probe", "-o", "c.json", "--device", "x", "--max-mb", "0", "--timeout-s", "nan"]
    assert main(argv) == 2
    message = capsys.readouterr().err
    for part in ("5 faults", "2 ranks or more", "must end in .yaml", "--max-mb is 0", "no preset"):
        assert part in message
    assert "--timeout-s is nan" in message and not list(here.iterdir())


def test_probe_reads_jobs_of_torchrun_and_srun() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    torchrun |= {"MASTER_PORT": "29500"}
    assert job_of({**torchrun, "SLURM_PROCID": "0", "HOME": "/"}) == torchrun
    srun = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "12345"}
    assert job_of({**srun, "MASTER_ADDR": "a"}) == {**torchrun, "MASTER_PORT": "22345"}
    with pytest.raises(UserError, match="MASTER_ADDR not set"):
        job_of(srun)


def test_clusters_are_listed_and_printed(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert main(["clusters"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in cluster_presets())
    assert main(["clusters", "pulse-910a"]) == 0
    (here / "own.yaml").write_text(capsys.readouterr().out)
    assert cluster("own.yaml") == cluster("pulse-910a")
    assert main(["clusters", "dgx-a100:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == 4
    assert main(["clusters", "dgx"]) == 2
    assert "no cluster is called 'dgx'; did you mean dgx-" in capsys.readouterr().err
