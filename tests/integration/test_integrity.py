"""Damaged checkpoints are refused, whatever the damage, and nothing that they say is run."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.integration.checkpoint.folders import LATEST, CheckpointError, step_folder
from megatron_pulse.integration.checkpoint.integrity import hashes as integrity
from megatron_pulse.integration.checkpoint.integrity.hashes import METADATA
from megatron_pulse.integration.checkpoint.integrity.verify import require_intact, require_readable
from megatron_pulse.integration.checkpoint.safe_unpickling import patch_reading
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.checkpoint.selection.recovery import (
    describe_newer,
    describe_passed,
    newest_intact,
    newest_readable,
    set_aside,
)
from tests.integration.test_bad_input import refuse

STEP, OTHER = "iter_0000006", "iter_0000003"
CHANCE = random.Random(20)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[CHANCE.randrange(len(content))] ^= 1 << CHANCE.randrange(8)
    file.write_bytes(content)


def zero_page(file: Path) -> None:
    content = file.read_bytes()
    first = CHANCE.randrange(max(1, len(content) - 4096))
    file.write_bytes(
        content[:first] + bytes(len(content[first : first + 4096])) + content[first + 4096 :]
    )


def cut(file: Path) -> None:
    os.truncate(file, CHANCE.randrange(file.stat().st_size))


def append(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(CHANCE.randbytes(CHANCE.randint(1, 5000)))


def swap(file: Path) -> None:
    shutil.copy(file.parent.parent / OTHER / file.name, file)


def delete(file: Path) -> None:
    file.unlink()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = [flip, flip, flip, zero_page, cut, append, swap, delete, pipe]


def unsealed(folder: Path) -> None:
    """As it was before hashes were kept."""
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / METADATA).write_text(json.dumps(config))


@pytest.mark.parametrize("optimizer", ["saved", "sharded"])
def test_any_damage_of_any_file(
    optimizer: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is named, and so is the step that is left."""
    run: Path = request.getfixturevalue(optimizer)
    names = sorted(file.name for file in (run / STEP).iterdir())
    assert names == [".metadata", "__0_0.distcp", METADATA]
    require_readable(run / STEP)
    require_intact(run / STEP)
    for name in names:
        for damage in DAMAGES:
            copy = Path(shutil.copytree(run, tmp_path / "copy"))
            damage(copy / STEP / name)
            with pytest.raises(CheckpointError) as error:
                require_intact(copy / STEP)
            said = str(error.value)
            assert said.startswith(f"{copy / STEP} is damaged"), (name, damage)
            assert "step 3 there is intact" in said and "--ckpt-step 3" in said
            assert name in said or (name, damage) == (METADATA, swap)
            shutil.rmtree(copy)


def test_shares_cover_everything(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several ranks reads its own chunks; together they find damage anywhere."""
    monkeypatch.setattr(integrity, "CHUNK_BYTES", 4096)
    folder = copy / STEP
    hashes = {name: integrity._hash_file(folder / name) for name in (".metadata", "__0_0.distcp")}
    chunks = integrity.all_chunks(hashes)
    assert len(chunks) == sum(-(-hashed.num_bytes // 4096) for hashed in hashes.values())
    flip(folder / "__0_0.distcp")
    found = [list(integrity.find_hash_faults(folder, hashes, chunks[rank::3])) for rank in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]
    assert integrity.chunks_of("a", 4095, 2) == [integrity.Chunk("a", 0), integrity.Chunk("a", 1)]
    assert integrity.chunks_of("a", 4096, 0) == [integrity.Chunk("a", 1)]


def test_hashed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "CHUNK_BYTES", 4096)
    for num_bytes in (0, 1, 4095, 4096, 4097, 8192, 50_000):
        content = CHANCE.randbytes(num_bytes)
        file = integrity.HashedFile(tmp_path / "file")
        with integrity.BufferedFile(file, 1000) as buffered:
            for first in range(0, num_bytes, 700):
                buffered.write(content[first : first + 700])
            assert os.stat(buffered.fileno()).st_size == num_bytes
        assert (tmp_path / "file").read_bytes() == content
        assert file.hashed == integrity._hash_file(tmp_path / "file")


def test_hashes_of_earlier_checkpoints(copy: Path) -> None:
    """SHA-256 are verified as well."""
    kind, folder = integrity.HashKind.SHA256, copy / STEP
    hashes = {
        name: replace(hashed, kind=kind, chunks=(integrity._hash_chunk(folder / name, 0, kind),))
        for name, hashed in (integrity.read_hashes(folder) or {}).items()
    }
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / METADATA).write_text(integrity.metadata_text(config, hashes))
    assert "sha256" in (folder / METADATA).read_text() and len(hashes) == 2
    require_intact(folder)
    flip(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="__0_0.distcp: content differs from what was saved"):
        require_intact(folder)


def test_what_is_read_first_is_verified_first(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are not taken from a damaged file, and a moved step is none."""
    (copy / STEP / "__0_0.distcp").write_bytes(
        (copy / STEP / "__0_0.distcp").read_bytes().replace(b"uvit-tiny", b"uvit-tinz")
    )
    asked = ["--load", str(copy), "--ckpt-step", "6"]
    (fault,) = refuse(monkeypatch, 1, ["--seed", "5", *asked])
    assert fault.startswith(f"--load: {copy / STEP} is damaged: __0_0.distcp: content")
    assert "step 3 there has correct file sizes" in fault
    saved, (passed,) = newest_readable(copy)
    assert saved.iteration == 3 and passed.step == 6 and "(__0_0.distcp: content" in passed.reason
    shutil.rmtree(copy / STEP)
    (copy / OTHER).rename(copy / STEP)
    with pytest.raises(CheckpointError, match="holds step 3: it was renamed"):
        read_saved_run(copy)


def test_saved_without_hashes(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read as before, with a line that says what is not known; it is no step to go back to."""
    unsealed(copy / OTHER)
    assert read_saved_run(copy, 3).iteration == 3
    require_intact(copy / OTHER)
    assert capsys.readouterr().out.count("damage cannot be detected") == 1
    flip(copy / STEP / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no other step there is intact"):
        require_intact(copy / STEP)
    pipe(copy / OTHER / "__0_0.distcp")
    for read in (read_saved_run, lambda folder, step: require_intact(folder / OTHER)):
        with pytest.raises(CheckpointError, match="__0_0.distcp: not a regular file"):
            read(copy, 3)


def digits(path: Path) -> None:
    path.write_text("9" * 5000)


def wide_digit(path: Path) -> None:
    path.write_text("\N{FULLWIDTH DIGIT SIX}")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (pipe, "it is not a regular file"),
        (directory, "Is a directory"),
        (digits, "does not name an iteration: '9999"),
        (wide_digit, "does not name an iteration: '\\uff16'"),
    ],
)
def test_the_name_of_the_newest(
    damage: Callable[[Path], None], reason: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the name is damaged, a run continues from its last step and rewrites it."""
    damage(copy / LATEST)
    (fault,) = refuse(monkeypatch, 1, ["--seed", "5", "--pretrained-checkpoint", str(copy)])
    assert LATEST in fault and reason in fault and "\n" not in fault
    saved, passed = newest_readable(copy)
    assert saved.iteration == 6 and LATEST in passed[0].reason and passed[0].step is None
    set_aside(passed, saved, argparse.Namespace(save=str(copy)))
    assert (copy / LATEST).read_text() == "6" and newest_readable(copy)[1] == ()


def test_any_flipped_bit_of_the_newest_step_s_name(copy: Path) -> None:
    """No other step takes its place, or it is said that there is a newer one."""
    for bit in range(8):
        (copy / LATEST).write_bytes(bytes([ord("6") ^ 1 << bit]))
        saved, passed = newest_readable(copy)
        assert saved.iteration == 6 and LATEST in passed[0].reason
        assert "lost" not in describe_passed(passed, saved)[-1]
    (copy / LATEST).write_text("3")
    saved, passed = newest_readable(copy)
    assert saved.iteration == 3 and passed == ()
    newer = describe_newer(saved)
    assert LATEST in newer and "--ckpt-step 6" in newer
    assert not describe_newer(read_saved_run(copy, 6))


def test_every_step_that_can_be_read_counts(copy: Path, tmp_path: Path) -> None:
    """The newest is half-written, its name lost, the next set aside; nothing is left in the end."""
    args = argparse.Namespace(save=str(copy))
    cut(copy / STEP / METADATA)
    saved, passed = newest_readable(copy)
    assert saved.iteration == 3 and [one.step for one in passed] == [6]
    words = describe_passed(passed, saved)
    assert f"{copy / STEP} is damaged" in words[0] and "steps 4 to 6 are lost" in words[-1]
    set_aside(passed, saved, argparse.Namespace(save=str(tmp_path / "another")))
    assert (copy / STEP).is_dir()
    for aside in (f"{STEP}.damaged", f"{STEP}.damaged.2"):
        set_aside(passed, saved, args)
        assert (copy / aside).is_dir() and not (copy / STEP).exists()
        assert (copy / LATEST).read_text() == "3"
        shutil.copytree(copy / aside, copy / STEP)
    (copy / LATEST).unlink()
    saved, passed = newest_readable(copy)
    assert saved.iteration == 3 and [one.step for one in passed] == [None, 6]
    cut(copy / OTHER / METADATA)
    with pytest.raises(CheckpointError, match=LATEST):
        newest_readable(copy)


def test_all_that_was_passed_is_said(copy: Path) -> None:
    """Step 5 is not what it says, nobody knows whether 4 is whole; neither was said before, and of
    what was moved no step was lost."""
    for step in (4, 5):
        shutil.copytree(copy / OTHER, copy / step_folder(step))
    unsealed(copy / step_folder(4))
    newest = read_saved_run(copy)
    flip(copy / STEP / "__0_0.distcp")
    saved, passed = newest_intact(newest)
    assert saved.iteration == 3
    assert [(one.step, one.lost) for one in passed] == [(6, 6), (5, 3), (None, None)]
    words = describe_passed(passed, saved)
    assert "holds step 3" in words[1] and "without hashes" in words[2]
    assert "steps 4 to 6 are lost" in words[-1]
    shutil.copytree(copy / OTHER, copy / step_folder(9))
    (copy / LATEST).write_text("9")
    saved, passed = newest_readable(copy)
    assert saved.iteration == 3
    assert [(one.step, one.lost) for one in passed] == [(9, 3), (6, 6), (5, 3), (4, 3)]
    assert "steps 4 to 6 are lost" in describe_passed(passed, saved)[-1]


class Code:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def test_no_code_is_run(copy: Path, tmp_path: Path) -> None:
    """Neither of the index nor of an object, even where there are no hashes."""
    made = tmp_path / "made"
    unsealed(copy / STEP)
    (copy / STEP / ".metadata").write_bytes(pickle.dumps(Code(made)))
    with pytest.raises(CheckpointError, match="mkdir, which is not allowed in a checkpoint"):
        read_saved_run(copy)
    patch_reading()
    dcp.save({"x": Code(made)}, checkpoint_id=str(tmp_path / "objects"), no_dist=True)
    with pytest.raises(CheckpointException, match="mkdir"):
        dcp.load({"x": None}, checkpoint_id=str(tmp_path / "objects"), no_dist=True)
    assert not made.exists()
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "tensors"), no_dist=True)
    read = {"x": torch.zeros(2)}
    dcp.load(read, checkpoint_id=str(tmp_path / "tensors"), no_dist=True)
    assert read["x"].tolist() == [1, 1]
