"""Checkpoints that are written beside training: the same tensors, whole or not there at all."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_pulse.integration.checkpoint.folders import step_folder
from megatron_pulse.integration.checkpoint.integrity.verify import require_intact
from megatron_pulse.integration.checkpoint.selection.recovery import newest_readable
from tests.integration.conftest import FIRST
from tests.integration.runs import BASE, TINY, pipeline, train
from tests.ranks import RanksFailed, run_ranks

FLAGS = [*TINY["uvit"], *BASE, *FIRST, "--async-save"]


def write_late(act: Callable[[int], None] = lambda step: None) -> None:
    """Writers go on, in the middle of their file, when a step has been made since, if there is
    another; then ``act`` is told how many."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.training.training as training
    from megatron.training.global_vars import get_args

    from megatron_pulse.runtime.stop_signals import STOP

    made = threading.Condition()
    steps, items = 0, threading.local()
    step, write = training.train_step, filesystem._write_item

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        result = step(*args, **kwargs)
        with made:
            steps = get_args().curr_iteration + 1
            made.notify_all()
        return result

    @functools.wraps(write)
    def late(transforms: Any, stream: Any, *rest: Any, **kwargs: Any) -> Any:
        items.num = getattr(items, "num", 0) + 1
        if threading.current_thread().name == "checkpoint" and items.num == 20:
            stream.flush()
            with made:
                saved = steps
                last = STOP.received is not None or saved == get_args().train_iters
                made.wait_for(lambda: last or steps > saved, 60)
            act(steps)
        return write(transforms, stream, *rest, **kwargs)

    training.train_step, filesystem._write_item = counted, late


def copy_at_moments(folder: Path, copies: Path) -> None:
    """Copy ``folder`` as SIGKILL would leave it, before a file there is written or renamed."""
    rank, numbers, copying = os.environ["RANK"], itertools.count(), threading.Lock()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "os.rename" and (event != "open" or "w" not in (args[1] or "")):
            return
        if not str(args[0]).startswith(str(folder)) or not copying.acquire(blocking=False):
            return
        try:
            _copy(folder, copies / f"{rank}-{next(numbers)}")
        finally:
            copying.release()

    sys.addaudithook(hook)


def _copy(folder: Path, copy: Path) -> None:
    # What names the newest is read first: the other rank goes on meanwhile.
    for file in sorted(folder.rglob("*"), reverse=True):
        if file.is_file():
            (copy / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                shutil.copyfile(file, copy / file.relative_to(folder))


def killed(folder: str) -> None:
    """Rank 1, when half of the last step is written."""

    def act(step: int) -> None:
        if step == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    write_late(act)
    train([*FLAGS, *pipeline(2), "--save", folder])


def copied(folder: str, copies: str) -> None:
    """Go on; ``copies`` get what is there at all moments."""
    write_late()
    copy_at_moments(Path(folder), Path(copies))
    train([*FLAGS, *pipeline(2), "--save", folder])


def test_the_same_and_whole_whenever_it_is_killed(saved: Path, tmp_path: Path) -> None:
    folder, copies = tmp_path / "run", tmp_path / "copies"
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, killed, str(folder))
    assert failed.value.exit_codes == [1, -signal.SIGKILL]
    assert re.search("first failure in this job: rank 0: .*rank 1", failed.value.outputs[0])
    assert newest_whole(folder) == 3 and (folder / step_folder(6)).is_dir()
    run_ranks(2, copied, str(folder), str(copies))
    for step in (3, 6):
        expected, found = (tensors(one / step_folder(step)) for one in (saved, folder))
        assert expected.keys() == found.keys()
        assert not [name for name in expected if not expected[name].equal(found[name])]
    for rank in (0, 1):
        moments = sorted(copies.glob(f"{rank}-*"), key=lambda one: int(one.name[2:]))
        assert {newest_whole(moment) for moment in moments} <= {3, 6}
    half = [moment for moment in copies.iterdir() if newest_whole(moment) == 3]
    assert sum((moment / step_folder(6)).is_dir() for moment in half) > 5


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name."""
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in there.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def newest_whole(folder: Path) -> int:
    """The step that a run would go on from: none is damaged."""
    saved, passed = newest_readable(folder)
    require_intact(saved.folder)
    assert not passed
    return saved.iteration


def told_while_it_is_written(folder: str) -> Any:
    write_late(lambda step: os.kill(os.getpid(), signal.SIGTERM))
    flags = [*FLAGS, "--train-iters", "1000", "--save", folder]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return len(train(flags)["losses"]), out.getvalue()


def test_told_to_stop_it_says_so_when_the_last_is_whole(tmp_path: Path) -> None:
    ((steps, said),) = run_ranks(1, told_while_it_is_written, str(tmp_path))
    assert steps >= 4 and f"stopped (SIGTERM) after step {steps}: saved in" in said
    assert newest_whole(tmp_path) == steps
