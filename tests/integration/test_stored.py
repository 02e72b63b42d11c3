"""``pulse checkpoint``: what is in a run's folder, whether it is whole, and what may go."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.folders import LATEST, RELEASE, step_folder
from megatron_pulse.integration.checkpoint.integrity.hashes import METADATA
from megatron_pulse.integration.checkpoint.lock import FolderLock
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.checkpoint.selection.pruning import to_remove
from megatron_pulse.integration.checkpoint.selection.recovery import newest_intact, newest_readable
from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import REMOVED, stored_in
from tests.integration.test_integrity import DAMAGES, flip, unsealed
from tests.ranks import run_ranks


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """The status of a command, and all that it said."""
    try:
        status = main(["checkpoint", *map(str, words)])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    shown = capsys.readouterr()
    return status, shown.out + shown.err


@pytest.fixture
def steps(copy: Path) -> Path:
    """Steps 1, 2, 3 and 6, of which the first two are links' worth of copies, and leftovers."""
    for step in (1, 2):
        shutil.copytree(copy / step_folder(3), copy / step_folder(step))
    (copy / "iter_0000004").mkdir()
    (copy / "iter_0000004" / "__0_0.distcp").write_bytes(b"half")
    shutil.copytree(copy / step_folder(3), copy / "iter_0000005.damaged")
    (copy / f"iter_0000007{REMOVED}").mkdir()
    (copy / "failures").mkdir()
    return copy


def test_all_is_listed(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "list", steps)
    assert status == 0
    rows = [line.split()[0] for line in text.splitlines()]
    assert rows == [
        "step", "1", "2", "3", "4", "6", "iter_0000005.damaged", f"iter_0000007{REMOVED}"
    ]  # fmt: skip
    assert "half-written" in text and "set aside" in text and "half removed" in text
    assert [line for line in text.splitlines() if "the newest" in line][0].split()[0] == "6"
    _, text = said(capsys, "list", steps, "--json")
    assert [one["step"] for one in json.loads(text)] == [1, 2, 3, 4, 6, None, None]


@pytest.mark.parametrize("damage", dict.fromkeys(DAMAGES), ids=lambda damage: damage.__name__)
def test_damage_is_named(damage: object, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = damage.__name__  # type: ignore[attr-defined]
    status, text = said(capsys, "verify", copy)
    assert (status, text) == (0, "step 3: whole\nstep 6: whole\n")
    for name in ("__0_0.distcp", ".metadata", METADATA):
        if kind == "swap" and name == ".metadata":
            continue  # the index of another step is the same
        file = copy / step_folder(6) / name
        content = file.read_bytes()
        damage(file)  # type: ignore[operator]
        status, text = said(capsys, "verify", copy)
        state = text.splitlines()[1]
        assert status == 1 and state.startswith("step 6: ") and text.startswith("step 3: whole\n")
        if kind == "delete" and name == METADATA:
            name = "half-written"
        assert name in state or kind == "swap"  # the hashes of another step: all else is damaged
        assert said(capsys, "verify", copy, "--step", "3")[0] == 0
        if os.path.lexists(file):
            file.unlink()
        file.write_bytes(content)


def test_imported_weights_and_the_newest_s_name(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights without a step whose hashes cannot be read had been passed over as set aside."""
    (copy / LATEST).write_text("7")
    status, text = said(capsys, "verify", copy)
    assert status and "step 6: whole" in text and f"{LATEST} names 7, which does not exist" in text
    (copy / step_folder(6)).rename(copy / RELEASE)
    (copy / LATEST).write_text(RELEASE)
    assert said(capsys, "verify", copy)[0] == 0
    flip(copy / RELEASE / METADATA)
    status, text = said(capsys, "verify", copy)
    assert status == 1 and f"step {RELEASE}: " in text and METADATA in text


def test_what_goes(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def there() -> list[str]:
        return sorted(path.name for path in steps.iterdir() if path.name.startswith("iter"))

    before = there()
    status, text = said(capsys, "prune", steps, "--keep", "1", "--dry-run")
    assert status == 0 and "4 would be removed" in text and there() == before
    with_run = FolderLock(steps)
    assert _locked(steps) and there() == before
    with_run.release()
    status, text = said(capsys, "prune", steps, "--keep", "1", "--every", "2")
    assert status == 0 and there() == [
        "iter_0000002", "iter_0000004", "iter_0000005.damaged", "iter_0000006"
    ]  # fmt: skip
    assert "2 damaged or half-written stay: --damaged" in text
    (steps / LATEST).write_text("2")
    assert said(capsys, "prune", steps, "--keep", "1", "--damaged")[0] == 0
    assert there() == ["iter_0000002", "iter_0000006"]  # the newest, and what a run begins with
    (steps / LATEST).write_text("x")
    status, text = said(capsys, "prune", steps, "--keep", "1")
    assert status == 2 and "nothing was removed" in text and len(there()) == 2


def test_what_a_run_would_go_on_from_stays(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest has its sizes, and is damaged: the older one had been removed."""
    flip(copy / step_folder(6) / "__0_0.distcp")
    for damaged in ([], ["--damaged"]):
        status, text = said(capsys, "prune", copy, "--keep", "1", *damaged)
        assert status == 0 and "0 removed" in text and len(stored_in(copy)) == 2
    (copy / LATEST).write_text("3")
    status, text = said(capsys, "prune", copy, "--keep", "1", "--damaged", "--dry-run")
    assert status == 0 and "1 would be removed" in text
    assert f"would be removed: {step_folder(6)}" in text  # it is no newest that is to stay
    flip(copy / step_folder(3) / "__0_0.distcp")
    status, text = said(capsys, "prune", copy, "--keep", "1", "--damaged")
    assert status == 2 and "no step there is intact" in text and len(stored_in(copy)) == 2


def test_a_moved_step_is_no_whole_one(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / step_folder(6)).rename(copy / step_folder(7))
    (copy / LATEST).write_text("7")
    status, text = said(capsys, "verify", copy)
    assert status == 1 and "step 7: " in text and "holds step 6: it was renamed" in text
    assert said(capsys, "prune", copy, "--keep", "1")[0] == 0
    assert [one.step for one in stored_in(copy)] == [3, 7]


def test_what_is_being_saved_is_not_damaged(
    steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        shutil.rmtree(steps / step_folder(step))
    (steps / step_folder(4)).rename(steps / step_folder(7))
    assert "half-written" in said(capsys, "verify", steps)[1]
    lock = FolderLock(steps)
    assert run_ranks(1, main, ["checkpoint", "verify", str(steps)]) == [0]
    lock.release()
    assert said(capsys, "verify", steps)[0] == 1


def _locked(folder: Path) -> bool:
    """True if another process is refused."""
    return run_ranks(1, main, ["checkpoint", "prune", str(folder), "--keep", "1"]) == [2]


def test_links_and_strangers_stay(copy: Path, tmp_path: Path) -> None:
    (copy / step_folder(3)).rename(tmp_path / "elsewhere")
    (copy / step_folder(3)).symlink_to(tmp_path / "elsewhere")
    shutil.copytree(copy / step_folder(6), copy / step_folder(7))
    (copy / "iter_x").mkdir()
    stored = stored_in(copy)
    assert [one.step for one in stored] == [3, 6, 7]
    six, seven = (copy / step_folder(step) for step in (6, 7))
    assert to_remove(stored, {six, seven}) == []
    assert [one.step for one in to_remove(stored, {six})] == [7]
    (copy / step_folder(8)).symlink_to(seven)
    assert to_remove(stored_in(copy), {six}) == []
    (copy / step_folder(8)).unlink()
    (seven / "shards").mkdir()
    (seven / "shards" / "of_6").write_bytes((six / "__0_0.distcp").read_bytes())
    (six / "__0_0.distcp").unlink()
    (six / "__0_0.distcp").symlink_to(seven / "shards" / "of_6")
    assert to_remove(stored_in(copy), {six}) == []


def test_names_of_ones_own_are_left_alone(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy beside had been removed as what was set aside; a half removed one of the same step had
    been in the way of every later prune."""
    for name in (
        f"{step_folder(3)}.bak",
        f"{step_folder(3)}.keep.me",
        f"{step_folder(3)}{REMOVED}",
    ):
        shutil.copytree(copy / step_folder(3), copy / name)
    status, text = said(capsys, "prune", copy, "--keep", "1")
    assert status == 0 and "2 removed" in text
    left = sorted(path.name for path in copy.glob("iter*"))
    assert left == [f"{step_folder(3)}.bak", f"{step_folder(3)}.keep.me", step_folder(6)]
    assert [one.step for one in stored_in(copy)] == [6]


def test_a_run_and_pruning_have_one_rule(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both also continue from damaged checkpoints newer than the named one."""
    shutil.copytree(copy / step_folder(3), copy / step_folder(2))
    saved = read_saved_run(copy, 3)
    (copy / LATEST).write_text("3")
    flip(copy / step_folder(3) / "__0_0.distcp")
    assert newest_intact(saved)[0].iteration == 6 == newest_readable(copy)[0].iteration
    status, text = said(capsys, "prune", copy, "--keep", "1", "--damaged")
    assert status == 0 and [one.step for one in stored_in(copy)] == [3, 6]  # 2 is no step 2
    unsealed(copy / step_folder(6))
    assert newest_readable(copy)[0].iteration == 6  # without hashes nothing is known to be damaged
    status, text = said(capsys, "prune", copy, "--keep", "1")
    assert status == 0 and "0 removed" in text


@pytest.mark.parametrize(
    "words, faults",
    [
        (["prune"], ["needs --keep"]),
        (["prune", "--keep", "0", "--every", "0"], ["--keep 0", "--every 0"]),
        (["list", "--keep", "3", "--dry-run"], ["--keep, --dry-run: only for 'prune'"]),
        (["prune", "--keep", "1", "--step", "3"], ["--step: only for 'verify'"]),
        (["verify", "--step", "3", "5"], ["--step 5: "]),
    ],
)
def test_bad_words(
    words: list[str], faults: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, words[0], copy, *words[1:])
    assert status == 2 and all(fault in text for fault in faults)


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "list", tmp_path)[0] == 2
    status, text = said(capsys, "list", tmp_path / "none")
    assert status == 2 and "there is no such folder" in text
