"""Checkpoints that say what none of ours says: they are refused soon, in a sentence, and nothing
outside of their folder is read."""

from __future__ import annotations

import copy as copies
import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.folders import CheckpointError
from megatron_pulse.integration.checkpoint.integrity import hashes as integrity
from megatron_pulse.integration.checkpoint.integrity.verify import require_intact
from megatron_pulse.integration.checkpoint.saved_run import SavedRun, read_saved_run
from tests.integration.test_integrity import STEP, Code, unsealed

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
DATA = "__0_0.distcp"


def seal(folder: Path) -> None:
    """Hashes of what is there now."""
    hashes = {name: integrity._hash_file(folder / name) for name in (".metadata", DATA)}
    (folder / integrity.METADATA).write_text(integrity.metadata_text(CONFIG, hashes))


def is_common(of: Any) -> bool:
    return str(of.fqn).startswith("common_state")


def replaced(folder: Path, which: Callable[[Any], bool], **values: Any) -> None:
    """The index says ``values`` of the places of ``which``."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for of, place in index.storage_data.items():
        for name, value in values.items():
            if which(of):
                object.__setattr__(place, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def reason(folder: Path, sealing: Callable[[Path], None] = seal) -> str:
    """Error for the checkpoint in ``folder``, the same with and without known flags."""
    sealing(folder)
    with pytest.raises(CheckpointError) as error:
        read_saved_run(folder.parent, 6)
    with pytest.raises(CheckpointError) as again:
        require_intact(folder)
    assert str(again.value).splitlines()[0] == str(error.value).splitlines()[0]
    assert str(error.value).startswith(f"{folder} is damaged")
    return str(error.value)


def outside(folder: Path) -> str:
    shutil.copy(folder / DATA, folder.parent / "outside")
    return "../outside"


def absolute(folder: Path) -> str:
    return str((folder / outside(folder)).resolve())


def waiting(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "pipe"


def unhashed(folder: Path) -> str:
    shutil.copy(folder / DATA, folder / "more.distcp")
    return "more.distcp"


@pytest.mark.parametrize("sealing", [seal, unsealed])
@pytest.mark.parametrize("which", [is_common, lambda of: not is_common(of)], ids=["flags", "rest"])
@pytest.mark.parametrize("place", [outside, absolute, waiting, unhashed, lambda _: 3, lambda _: ""])
def test_only_files_of_the_folder_are_read(
    place: Callable[[Path], Any],
    which: Callable[[Any], bool],
    sealing: Callable[[Path], None],
    copy: Path,
) -> None:
    """Bare names of regular files there, which are hashed where any are."""
    folder = copy / STEP
    replaced(folder, which, relative_path=place(folder))
    if (place, sealing) == (unhashed, unsealed):
        sealing(folder)
        assert read_saved_run(copy, 6).iteration == 6
        return
    said = reason(folder, sealing)
    assert ".metadata: '" in said and ("which is no file name" in said or "which is no" in said)


@pytest.mark.parametrize(
    "values",
    [{"length": 1 << 50}, {"length": -5}, {"offset": -5}, {"offset": "x"}, {"length": 2.0}],
    ids=str,
)
def test_places_lie_within_their_files(values: dict[str, Any], copy: Path) -> None:
    """``1 << 50`` bytes were listed in chunks, and ``x`` added to a number."""
    for sealing in (seal, unsealed):
        replaced(copy / STEP, is_common, **values)
        assert "outside of __0_0.distcp with" in reason(copy / STEP, sealing)


def test_no_other_form_is_unpacked(copy: Path) -> None:
    replaced(copy / STEP, is_common, transform_descriptors=["zstd"])
    assert "is stored in another form" in reason(copy / STEP)


def remembered(content: bytes) -> bytes:
    """With something at place 2^28 of the memo, for which 4 GB of memory are taken."""
    return content[:2] + b"Nr" + struct.pack("<I", 1 << 28) + b"0" + content[2:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            remembered,
            "it has a pickle operation that is not allowed in a checkpoint: 0x72, at byte 3",
        ),
        (lambda content: content[:-10], "it is truncated, or has data after its end"),
        (lambda content: b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "it is truncated, or has data"),
        (lambda content: b"\x80\x04R.", "unpickling stack underflow"),
        (lambda content: b"\x80\x04)}}b.", "it is not a checkpoint index"),
        (lambda content: b"\x80\x04N.", "has no entries of tensor locations"),
        (lambda content: b"", "it is not a checkpoint index"),
    ],
)
def test_an_index_takes_no_more_memory_than_its_file(
    change: Callable[[bytes], bytes], said: str, copy: Path
) -> None:
    file = copy / STEP / ".metadata"
    file.write_bytes(change(file.read_bytes()))
    for sealing in (seal, unsealed):
        assert f"is damaged: .metadata: {said}" in reason(copy / STEP, sealing)


def test_hashes_are_of_files_of_the_folder_and_as_many_as_their_bytes(copy: Path) -> None:
    folder = copy / STEP
    hashes = integrity.read_hashes(folder) or {}
    for wrong in (
        {**hashes, "../outside": hashes[DATA]},
        {**hashes, DATA: integrity.FileHash(hashes[DATA].num_bytes, hashes[DATA].chunks * 1000)},
        {**hashes, DATA: integrity.FileHash(hashes[DATA].num_bytes, ())},
    ):
        (folder / integrity.METADATA).write_text(integrity.metadata_text(CONFIG, wrong))
        with pytest.raises(CheckpointError, match="metadata.json: content differs from what was"):
            read_saved_run(copy, 6)
    (folder / integrity.METADATA).write_text("{}")
    with pytest.raises(CheckpointError, match="metadata.json: 'sharded_backend' is missing"):
        read_saved_run(copy, 6)


def stored(folder: Path) -> tuple[bytes, Any]:
    """The object that holds the flags of the run, as it is stored and as it is."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = (place for of, place in index.storage_data.items() if is_common(of))
    content = (folder / DATA).read_bytes()[place.offset :][: place.length]
    return content, torch.load(io.BytesIO(content), weights_only=False)


def store(folder: Path, content: bytes) -> None:
    """In the place of it, ``content``."""
    with (folder / DATA).open("ab") as file:
        replaced(folder, is_common, offset=file.tell(), length=len(content))
        file.write(content)
    seal(folder)


def saved_by_torch(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def test_stored_objects_are_as_torch_writes_them(copy: Path, tmp_path: Path) -> None:
    """Compressed ones can be larger than any memory; what is refused is said in our words."""
    folder, packed = copy / STEP, io.BytesIO()
    content, value = stored(folder)
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as again,
    ):
        for name in archive.namelist():
            again.writestr(name, archive.read(name))
    made = tmp_path / "made"
    for changed, said in (
        (packed.getvalue(), "records are compressed .*torch.save never does"),
        (pickle.dumps(value), "its contents were not written by torch.save"),
        (saved_by_torch(Code(made)), "mkdir, which is not allowed in a checkpoint$"),
        (saved_by_torch([1]), "was not written by megatron_pulse"),
        (saved_by_torch([{"args": 5}]), "was not written by megatron_pulse"),
        (content, ""),
    ):
        store(folder, changed)
        if said:
            with pytest.raises(CheckpointError, match=said):
                read_saved_run(copy, 6)
    assert read_saved_run(copy, 6).iteration == 6 and not made.exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pulse_record": [1, 2]}, "pulse_record is [1, 2]; allowed is a backbone's record"),
        ({"pulse_record": None}, "pulse_record is None; allowed is a backbone's record"),
        ({"pulse_record": {"name": "uvit-tiny"}}, "pulse_record.options is missing"),
        ({"pulse_record": {"name": 1, "options": {}}}, "pulse_record.name is 1"),
        ({"pulse_data": 5}, "pulse_data is 5; allowed is a text, or None"),
        ({"pulse_ema_decay": "x"}, "pulse_ema_decay is 'x'; allowed is a number"),
        ({"pulse_process": {"objective": "nope"}}, "objective 'nope' is not one of"),
        ({"pulse_process": {"colour": 1}}, "its diffusion process: TypeError"),
        ({"pulse_process": None, "pulse_objective": 7}, "its diffusion process"),
        ({"consumed_train_samples": "x"}, "consumed_train_samples is 'x'"),
        ({"pulse_data": 5, "optimizer": 6}, "(2 faults)"),
    ],
)
def test_flags_that_no_run_has_written(
    values: dict[str, Any], said: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, value = stored(copy / STEP)
    changed = copies.deepcopy(value)
    vars((changed[0] if isinstance(changed, list) else changed)["args"]).update(values)
    store(copy / STEP, saved_by_torch(changed))
    assert main(["export", "--load", str(copy), "--to", str(copy / "model.pth")]) == 2
    shown = capsys.readouterr().err
    assert f"{copy / STEP} is damaged" in shown and said in shown
    assert isinstance(read_saved_run(copy, 3), SavedRun)
