"""What a run begins with: nothing, a saved run to continue, or the weights of one."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_pulse.flag_fields import flag_name
from megatron_pulse.integration.checkpoint.checkpoints import SavedRun, read_saved_run
from megatron_pulse.integration.checkpoint.choosing.falling_back import (
    Passed,
    describe_newer,
    describe_passed,
    newest_whole,
    read_newest,
    set_aside,
)
from megatron_pulse.integration.checkpoint.folders import (
    LATEST,
    RELEASE,
    RESTORE,
    CheckpointError,
    checkpoint_folder,
    complete_checkpoints,
    is_published,
    lost_run,
    newest,
    newest_named,
)
from megatron_pulse.integration.checkpoint.integrity.verify import require_whole
from megatron_pulse.integration.checkpoint.lock import FolderInUse, FolderLock


@dataclass(frozen=True)
class Start:
    """The saved run that a run begins with.

    ``given`` is what asked for it, such as ``--load runs/a``, for messages. A run that is
    ``continued`` goes on with its iteration, optimizer, schedule, random states and place in the
    data; else its weights and their averages alone are taken, and steps count from 0. ``named``
    is false where --save alone found it, which continues nothing but the same run. One that is the
    ``newest`` there, and not one that was asked for by number, ``passed`` over what is damaged.
    """

    saved: SavedRun
    given: str
    continued: bool
    named: bool = True
    newest: bool = False
    passed: tuple[Passed, ...] = ()


def find_start(args: argparse.Namespace) -> Start | None:
    """What ``--load``, ``--pretrained-checkpoint`` and ``--save`` ask to begin with, if anything.

    A run goes on from the newest checkpoint in ``--save`` by itself; ``--pretrained-checkpoint``
    counts until there is one. Raises CheckpointError where a folder that was named holds nothing,
    or flags contradict each other.
    """
    for name in ("load", "save", "pretrained_checkpoint"):
        if getattr(args, name) == "":
            raise CheckpointError(
                f"{flag_name(name)} is empty: is a variable of the shell not set?"
            )
    if args.load is not None:
        return _named(args)
    if args.finetune:
        raise CheckpointError("--finetune takes weights from a --load: name it")
    if args.save is not None and _holds_a_run(Path(args.save)):
        if args.ckpt_step is not None and args.pretrained_checkpoint is None:
            raise CheckpointError(
                f"--ckpt-step: to go back to that step, name the folder: --load {args.save}"
            )
        start = _start("--save", args.save, None, True, named=False)
        if not start.continued:
            raise CheckpointError(
                f"--save {args.save} holds published weights and no run: name another --save, and "
                f"begin with them by --pretrained-checkpoint {args.save}"
            )
        return start
    if args.pretrained_checkpoint is not None:
        return _start("--pretrained-checkpoint", args.pretrained_checkpoint, args.ckpt_step, False)
    if args.ckpt_step is not None:
        raise CheckpointError("--ckpt-step is for --load or --pretrained-checkpoint: name a folder")
    return None


def _named(args: argparse.Namespace) -> Start:
    if args.pretrained_checkpoint is not None:
        raise CheckpointError(
            "--load and --pretrained-checkpoint both say where to begin: give one"
        )
    try:
        start = _start("--load", args.load, args.ckpt_step, not args.finetune)
    except CheckpointError as error:
        if args.save is None or Path(args.load).resolve() != Path(args.save).resolve():
            raise
        if _holds_a_run(Path(args.save)):
            raise
        raise CheckpointError(
            f"{error}; to begin a run there, and to continue it later, give --save alone"
        ) from error
    if args.save is not None and _holds_a_run(Path(args.save)):
        if Path(args.load).resolve() != Path(args.save).resolve():
            raise CheckpointError(
                f"--save {args.save} holds a run already, which --load {args.load} would begin "
                "anew: leave --load out to go on with it, or name another --save"
            )
        if not start.continued:
            raise CheckpointError(
                f"--load {args.load} would begin a new run over itself: name another --save"
            )
    return start


def _start(
    flag: str, folder: str, iteration: int | None, continued: bool, named: bool = True
) -> Start:
    """What ``flag`` asks for; published weights have nothing but themselves to continue."""
    by_itself = continued and iteration is None
    passed: tuple[Passed, ...] = ()
    try:
        if by_itself:
            saved, passed = read_newest(folder)
        else:
            saved = read_saved_run(folder, iteration)
    except CheckpointError as error:
        raise CheckpointError(f"{flag}: {error}") from error
    continued = continued and not saved.released
    return Start(saved, f"{flag} {folder}", continued, named, by_itself and continued, passed)


def whole_start(start: Start, args: argparse.Namespace, holds: bool) -> Start:
    """``start`` with every byte verified, or an older step of its run (collective).

    What is damaged is said, and set aside where this process ``holds`` --save. Raises
    CheckpointError where nothing is whole, or a damaged one was asked for.
    """
    folder, *others = folders_read(start, args)
    if start.newest and not others:
        saved, passed = newest_whole(start.saved, start.passed)
        start = replace(start, saved=saved, passed=passed)
    else:
        for one in (folder, *others):
            require_whole(one)
    if start.passed and args.rank == 0:
        print("\n".join(describe_passed(start.passed, start.saved)), flush=True)
        if holds:
            set_aside(start.passed, start.saved, args)
    elif start.newest and args.rank == 0 and (newer := describe_newer(start.saved)):
        print(newer, flush=True)
    return start


def _holds_a_run(save: Path) -> bool:
    """Whether there is a checkpoint, though the file that names the newest may be lost.

    Raises CheckpointError for published weights, and for a run of which nothing can be read.
    """
    if os.path.lexists(save / LATEST) or complete_checkpoints(save):
        return True
    if lost := lost_run(save):
        raise CheckpointError(f"--save {save} holds a run that is damaged: {lost}; {RESTORE}")
    if is_published(save):
        raise CheckpointError(
            f"--save {save} holds published weights and no run: name another --save; 'pulse "
            f"import --from {save} --to DIR' makes a checkpoint of them, to begin with by "
            "--pretrained-checkpoint DIR"
        )
    return False


def enter(args: argparse.Namespace, start: Start | None) -> None:
    """Let Megatron load ``start``: whatever asked for it, --load names it from here on."""
    args.pretrained_checkpoint = None
    if start is None:
        return
    args.load = str(start.saved.folder.parent)
    args.ckpt_step = start.saved.iteration or None
    args.finetune = not start.continued
    if start.continued:
        # Flags say what the schedule is from here on (see loading.py).
        args.override_opt_param_scheduler = not args.use_checkpoint_opt_param_scheduler


def folders_read(start: Start, args: argparse.Namespace) -> list[Path]:
    """The checkpoints that Megatron reads: of non-persistent ones a newer one than ``start``."""
    folder = start.saved.folder
    if args.non_persistent_ckpt_type is None:
        return [folder]
    below = Path(args.non_persistent_global_ckpt_dir or folder.parent / "non_persistent")
    latest = newest(below)
    if latest is None or latest == RELEASE or int(latest) < start.saved.iteration:
        return [folder]
    return [folder, checkpoint_folder(below)]


def finished(start: Start | None, args: argparse.Namespace) -> str | None:
    """Why no step is left to make, and how to go on; None where there is one."""
    if start is None or (done := _done(start, args)) is None:
        return None
    reached, flag = done
    return (
        f"{start.saved.folder.parent} is finished: it holds {reached} of {flag}. Raise "
        f"{flag.split()[0]} to go on, or name another --save for another run."
    )


def no_step_elsewhere(start: Start | None, args: argparse.Namespace) -> list[str]:
    """That a finished run which --load names leaves nothing to do for another --save."""
    if start is None or not start.named or args.save is None:
        return []
    folder = start.saved.folder.parent
    if Path(args.save).resolve() == folder.resolve() or (done := _done(start, args)) is None:
        return []
    reached, flag = done
    return [
        f"{start.given} holds {reached}, so {flag} leaves no step for --save {args.save}: raise "
        f"{flag.split()[0]}, or begin anew with its weights by --pretrained-checkpoint {folder}"
    ]


def _done(start: Start, args: argparse.Namespace) -> tuple[str, str] | None:
    """(how far the run is, the flag that it has reached); None where a step is left."""
    saved = start.saved
    if not start.continued or args.skip_train:
        return None
    if args.train_samples is not None:
        if steps_left(args, saved.num_samples) > 0:
            return None
        return f"{saved.num_samples} samples", f"--train-samples {args.train_samples}"
    counted = args.override_ckpt_iteration
    if args.train_iters > (saved.iteration if counted is None else counted):
        return None
    return f"iteration {saved.iteration}", f"--train-iters {args.train_iters}"


def steps_left(args: argparse.Namespace, num_samples: int) -> int:
    """How many steps ``--train-samples`` leaves after ``num_samples``."""
    return int((args.train_samples - num_samples) // args.global_batch_size)


def lock_for_job(save: str | None, found: str | None) -> FolderLock | None:
    """Let rank 0 hold ``save`` for the whole job (collective); None where there is nothing to hold.

    ``found`` is what this rank saw of the folder before, its ``newest_named``. Raises FolderInUse
    on every rank if another run writes there, has just written, ranks saw different folders, or
    the folder cannot be written.
    """
    if save is None:
        return None
    lock, fault, rank = None, None, dist.get_rank()
    if rank == 0:
        try:
            lock = FolderLock(Path(save))
            if (now := newest_named(save)) != found:
                fault = f"another run has just saved {now} in {save}: start this one again"
        except FolderInUse as error:
            fault = str(error)
        except OSError as error:
            fault = f"--save {save} cannot be written ({error.strerror}): name a folder that can be"
    told: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(told, (fault, found))
    if (fault := told[0][0]) is None:
        others = [r for r, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        if others:
            fault = (
                f"--save {save}: rank {others[0]} finds {told[others[0]][1] or 'no'} checkpoint "
                f"there, rank 0 {told[0][1] or 'none'}: it must be on storage that all ranks see"
            )
    if fault is not None:
        if lock is not None:
            lock.release()
        raise FolderInUse(fault)
    return lock
