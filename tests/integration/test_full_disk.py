"""A disk without room: said with the path, and the checkpoint before stays the newest."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.published import write_state_dict
from megatron_pulse.files import replacing, replacing_folder
from megatron_pulse.full_disk import why_full
from megatron_pulse.integration.checkpoint.published_weights import export_weights, whole_stage
from model_specs import load_backbone
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
        f"the checkpoint of step 2 cannot be written: {disk}/iter_0000002/__",
        ".distcp: No space left on device",
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
from megatron_pulse.full_disk import why_full
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


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this size, within.

    Python would leave truncated bytecode of modules that it imports for the first time.
    """
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none


WRITERS: dict[str, Callable[[Path], object]] = {
    "file.npy": lambda path: np.save(path, np.zeros(10_000)),
    "file.bin": lambda path: np.zeros(10_000).tofile(path),
    "file.pt": lambda path: torch.save(torch.zeros(10_000), path),
    "file.safetensors": lambda path: save_file({"a": torch.zeros(10_000)}, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_that_drop_the_reason(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(OSError) as failed, limited(20_000), replacing(path) as beside:
        WRITERS[name](beside)
    assert (failed.value.errno, failed.value.filename) == (errno.EFBIG, str(path))
    folder = tmp_path / "folder"
    with pytest.raises(OSError) as failed, limited(20_000), replacing_folder(folder) as beside:
        WRITERS[name](beside / name)
    assert failed.value.errno == errno.EFBIG
    assert Path(failed.value.filename) in (folder, folder / name)
    with pytest.raises(RuntimeError, match="mine"), replacing(path) as beside:
        beside.write_text("whole")
        raise RuntimeError("mine")
    assert list(tmp_path.iterdir()) == []


def test_limits_of_what_commands_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that is written is named, never the folder that is read; nothing is left of it."""
    backbone = ["uvit-tiny", "--option", "embed_dim=32", "--option", "in_channels=1"]
    built = load_backbone("uvit-tiny", {"embed_dim": "32", "in_channels": "1"})
    _, tensors = export_weights(built, whole_stage(built, initialise=True))
    write_state_dict(tmp_path / "uvit.pth", tensors)
    read = ["import", "--from", str(tmp_path / "uvit.pth"), "--backbone", *backbone]
    read += ["--objective", "v", "--noise-schedule", "cosine", "--to"]
    assert main([*read, str(tmp_path / "start")]) == 0
    there = sorted(tmp_path.iterdir())

    def refused(*words: str) -> str:
        capsys.readouterr()
        with limited(20_000):
            assert main([*words]) == 2
        said = capsys.readouterr().err
        assert "File too large; raise the limit of file sizes (ulimit -f), or write to" in said
        return said.splitlines()[-1].partition(" error: ")[2].partition(": File")[0]

    new = tmp_path / "new"
    assert refused(*read, str(new)) == f"{new}/release/__0_0.distcp"
    export = ["export", "--load", str(tmp_path / "start"), "--raw", "--to"]
    for name in ("new.pth", "new.safetensors"):
        assert refused(*export, str(tmp_path / name)) == str(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == there
    latents = ["data", "write-latents", "--from", "digits8", "--image-size", "16", "-o", str(new)]
    assert refused(*latents) == f"{new}/latent-00000.npy"


def train_limited(*flags: str) -> None:
    """Train; files of rank 1 are limited, and it writes a share of the checkpoint."""
    if os.environ["RANK"] == "1":
        sys.dont_write_bytecode = True  # it would be truncated
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    train([*LONG, *flags])


@pytest.mark.parametrize("beside", [[], ["--async-save"]], ids=["at once", "beside training"])
def test_a_limit_of_one_rank_is_told_by_any(beside: list[str], tmp_path: Path) -> None:
    flags = ["--train-iters", "1", "--save", str(tmp_path), "--save-interval", "1", *beside]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, train_limited, *flags)
    file = tmp_path / "iter_0000001" / "__1_0.distcp"
    for text in (
        f"the checkpoint of step 1 cannot be written: {file}: File too large",
        "no complete checkpoint. Delete iter_0000001, raise the limit of file sizes (ulimit -f)",
    ):
        assert said_once(failed.value, text)
    said = "".join(failed.value.outputs)
    assert "Traceback" not in said and "Local worker" not in said


def test_other_errors_are_others(tmp_path: Path) -> None:
    assert why_full(ValueError("no space"), [tmp_path]) is None
    chained = RuntimeError("I/O error: No space left on device (os error 28)")
    assert why_full(chained, [None, tmp_path]) == f"{tmp_path}: No space left on device"
