"""A disk without room: said with the path, and the checkpoint before stays the newest."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.errors import why_full
from tests.integration.runs import BASE, TINY, pipeline, run, train
from tests.integration.test_stopping import before_call
from tests.ranks import RanksFailed, run_ranks, said_once

LONG = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "4"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room on the disk of ``folder``."""
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break


def train_until_full(what: str, folder: str, *flags: str) -> None:
    """Train; rank 0 fills the disk when ``what`` begins for the second time."""
    import megatron.training.checkpointing as checkpointing

    from megatron_pulse.runtime.executor import Executor

    def act() -> None:
        if os.environ["RANK"] == "0":
            fill(Path(folder))

    if what == "save":
        before_call(checkpointing, "get_rng_state", 2, act)
    else:
        before_call(Executor, "run", 2, act)
    train([*LONG, *flags])


@pytest.mark.parametrize("beside", [[], ["--async-save"]], ids=["at once", "beside training"])
def test_no_room_for_a_checkpoint(beside: list[str], disk: Path) -> None:
    flags = ["--train-iters", "3", "--save", str(disk), "--save-interval", "1", *beside]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, train_until_full, "save", str(disk), *flags)
    for text in (
        f"the checkpoint of step 2 cannot be written: {disk}: No space left on device",
        "the newest complete checkpoint is step 1. Delete iter_0000002, free disk space",
    ):
        assert said_once(failed.value, text)
    assert "Traceback" not in "".join(failed.value.outputs)
    assert (disk / "latest_checkpointed_iteration.txt").read_text() == "1"
    (disk / "filler").unlink()
    assert len(run(2, *pipeline(2), "--global-batch-size", "4", *flags).losses) == 2  # goes on


@pytest.mark.parametrize("flag", ["--pulse-trace", "--tensorboard-dir"])
def test_no_room_for_what_a_run_writes(disk: Path, flag: str) -> None:
    trace = ["--pulse-trace-steps", "2-2"] if flag == "--pulse-trace" else []
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, train_until_full, "step", str(disk), flag, str(disk), *trace,
                  "--train-iters", "2000")  # fmt: skip
    said = "".join(failed.value.outputs)
    assert said.count("first failure in this job") == 1
    assert f"{disk}" in said and "No space left on device" in said and "Traceback" not in said


def test_no_room_for_what_a_command_writes(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    profile = disk / "profile.json"
    flags = ["--device", "analytic", "--preset", "A100-80GB", "-o", str(profile)]
    assert main(["profile", "--backbone", "uvit-tiny", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pulse profile: error: ") and "No space left on device" in said
    assert str(disk) in said and said.count("\n") == 1
    assert [file.name for file in disk.iterdir()] == ["filler"]


LIMITED = """
import resource, sys
from pathlib import Path
from megatron_pulse.errors import why_full
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Path(sys.argv[1]).write_bytes(bytes(2000))
except OSError as error:
    print(why_full(error, [sys.argv[1]]))
"""


def test_limits_of_files_count_as_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout == f"{tmp_path}/file: File too large\n"


def test_other_errors_are_others(tmp_path: Path) -> None:
    assert why_full(ValueError("no space"), [tmp_path]) is None
    chained = RuntimeError("I/O error: No space left on device (os error 28)")
    assert why_full(chained, [None, tmp_path]) == f"{tmp_path}: No space left on device"
