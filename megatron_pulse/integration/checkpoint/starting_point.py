"""Starting point of a run: new weights, a saved run to continue, or the weights of one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_pulse.dataclass_flags import flag_name
from megatron_pulse.integration.checkpoint.folders import (
    BEST,
    LATEST,
    RELEASE,
    RESTORE,
    CheckpointError,
    best_step,
    checkpoint_folder,
    complete_checkpoints,
    is_published,
    lost_run,
    newest,
    newest_named,
)
from megatron_pulse.integration.checkpoint.frozen_weights import FrozenWeights
from megatron_pulse.integration.checkpoint.integrity.verify import require_intact
from megatron_pulse.integration.checkpoint.lock import FolderInUse, FolderLock
from megatron_pulse.integration.checkpoint.saved_run import SavedRun, read_saved_run
from megatron_pulse.integration.checkpoint.selection.recovery import (
    SkippedCheckpoint,
    describe_newer,
    describe_passed,
    newest_intact,
    newest_readable,
    set_aside,
)
from megatron_pulse.runtime.collectives import gather_objects


@dataclass(frozen=True)
class StartingPoint:
    """Saved run that a run begins with.

    ``given`` is the flag that asked for it, such as ``--load runs/a``, for messages. A
    ``continued`` run continues with iteration, optimizer, schedule, random states and place in the
    data. Any other start takes the weights and their EMA only, and steps count from 0.

    ``named`` is false if --save alone found the run; then only the same run may continue.
    ``newest`` says that the newest step was taken, not a step asked for by number. ``passed`` are
    damaged newer steps that were skipped.
    """

    saved: SavedRun
    given: str
    continued: bool
    named: bool = True
    newest: bool = False
    passed: tuple[SkippedCheckpoint, ...] = ()


def find_best(args: argparse.Namespace) -> Iterator[str]:
    """Replace ``--ckpt-step best`` by its step; yields the fault if it is unknown."""
    if args.ckpt_step != BEST:
        return
    folder, args.ckpt_step = args.load or args.pretrained_checkpoint, None
    if folder is None:
        yield "--ckpt-step needs --load or --pretrained-checkpoint"
        return
    try:
        args.ckpt_step = best_step(Path(folder))
    except CheckpointError as error:
        yield f"--ckpt-step best: {error}"


def find_start(args: argparse.Namespace) -> StartingPoint | None:
    """Saved run that ``--load``, ``--pretrained-checkpoint`` or ``--save`` asks for, if any.

    A run with ``--save`` continues from the newest checkpoint there. ``--pretrained-checkpoint``
    counts until there is one; beside a run that leaves out imported frozen weights, it is their
    place. Raises CheckpointError if a named folder holds nothing, or if flags
    contradict each other.
    """
    for name in ("load", "save", "pretrained_checkpoint"):
        if getattr(args, name) == "":
            raise CheckpointError(f"{flag_name(name)} is empty: is a shell variable unset?")
    if args.load is not None:
        return _named(args)
    if args.finetune:
        raise CheckpointError("--finetune needs --load, the folder of the weights")
    if args.save is not None and _holds_a_run(Path(args.save)):
        if args.ckpt_step is not None and args.pretrained_checkpoint is None:
            raise CheckpointError(f"--ckpt-step needs the folder of that step: --load {args.save}")
        start = _start("--save", args.save, None, True, named=False)
        if not start.continued:
            raise CheckpointError(
                f"--save {args.save} holds published weights and no run. Name another --save, and "
                f"start with these weights: --pretrained-checkpoint {args.save}"
            )
        return start
    if args.pretrained_checkpoint is not None:
        return _start("--pretrained-checkpoint", args.pretrained_checkpoint, args.ckpt_step, False)
    if args.ckpt_step is not None:
        raise CheckpointError("--ckpt-step needs --load or --pretrained-checkpoint")
    return None


def _named(args: argparse.Namespace) -> StartingPoint:
    try:
        start = _start("--load", args.load, args.ckpt_step, not args.finetune)
    except CheckpointError as error:
        if args.save is None or Path(args.load).resolve() != Path(args.save).resolve():
            raise
        if _holds_a_run(Path(args.save)):
            raise
        raise CheckpointError(
            f"{error}. To start a run there, and to continue it later, give --save alone"
        ) from error
    frozen = start.saved.frozen_weights
    if args.pretrained_checkpoint is not None and not (frozen and frozen.imported):
        raise CheckpointError(
            f"--load and --pretrained-checkpoint exclude each other: give one. (Beside --load it "
            f"is the place of imported frozen weights; {args.load} leaves none out)"
        )
    if args.save is not None and _holds_a_run(Path(args.save)):
        if Path(args.load).resolve() != Path(args.save).resolve():
            raise CheckpointError(
                f"--save {args.save} already holds a run, which --load {args.load} would restart. "
                "Leave --load out to continue it, or name another --save"
            )
        if not start.continued:
            raise CheckpointError(
                f"--load {args.load} would overwrite itself with a new run. Name another --save"
            )
    return start


def _start(
    flag: str, folder: str, iteration: int | None, continued: bool, named: bool = True
) -> StartingPoint:
    """Saved run that ``flag`` asks for; published weights have no run to continue."""
    by_itself = continued and iteration is None
    passed: tuple[SkippedCheckpoint, ...] = ()
    try:
        if by_itself:
            saved, passed = newest_readable(folder)
        else:
            saved = read_saved_run(folder, iteration)
    except CheckpointError as error:
        raise CheckpointError(f"{flag}: {error}") from error
    continued = continued and not saved.released
    return StartingPoint(
        saved, f"{flag} {folder}", continued, named, by_itself and continued, passed
    )


def verified_start(start: StartingPoint, args: argparse.Namespace, holds: bool) -> StartingPoint:
    """Return ``start`` with every byte verified, or an older step of its run (collective).

    Damaged steps are reported, and set aside if this process ``holds`` --save. Raises
    CheckpointError if no step is intact, or if a damaged step was asked for by number.
    """
    folder, *others = folders_read(start, args)
    if start.newest and not others:
        saved, passed = newest_intact(start.saved, start.passed)
        start = replace(start, saved=saved, passed=passed)
    else:
        for one in (folder, *others):
            require_intact(one)
    frozen = FrozenWeights.of_checkpoint(args)
    is_start = frozen is not None and Path(frozen.folder) == folder.absolute()
    if frozen is not None and frozen.imported and not is_start:
        require_intact(Path(frozen.folder))
    if start.passed and args.rank == 0:
        print("\n".join(describe_passed(start.passed, start.saved)), flush=True)
        if holds:
            set_aside(start.passed, start.saved, args)
    elif start.newest and args.rank == 0 and (newer := describe_newer(start.saved)):
        print(newer, flush=True)
    return start


def _holds_a_run(save: Path) -> bool:
    """True if ``save`` holds a checkpoint, even if the file that names the newest is lost.

    Raises CheckpointError for published weights, and for a run of which nothing can be read.
    """
    if os.path.lexists(save / LATEST) or complete_checkpoints(save):
        return True
    if lost := lost_run(save):
        raise CheckpointError(f"--save {save} holds a damaged run: {lost}; {RESTORE}")
    if is_published(save):
        raise CheckpointError(
            f"--save {save} holds published weights and no run. Name another --save, convert the "
            f"weights ('pulse import --from {save} --to DIR'), and start with "
            "--pretrained-checkpoint DIR"
        )
    return False


def set_load_flags(args: argparse.Namespace, start: StartingPoint | None) -> None:
    """Let Megatron load ``start``, through --load from here on."""
    args.pretrained_checkpoint = None
    if start is None:
        return
    args.load = str(start.saved.folder.parent)
    args.ckpt_step = start.saved.iteration or None
    args.finetune = not start.continued
    if start.continued:
        # Flags set the schedule from here on (see loading.py).
        args.override_opt_param_scheduler = not args.use_checkpoint_opt_param_scheduler


def folders_read(start: StartingPoint, args: argparse.Namespace) -> list[Path]:
    """Checkpoints that Megatron reads: ``start``, and a non-persistent one if it is newer."""
    folder = start.saved.folder
    if args.non_persistent_ckpt_type is None:
        return [folder]
    below = Path(args.non_persistent_global_ckpt_dir or folder.parent / "non_persistent")
    latest = newest(below)
    if latest is None or latest == RELEASE or int(latest) < start.saved.iteration:
        return [folder]
    return [folder, checkpoint_folder(below)]


def finished(start: StartingPoint | None, args: argparse.Namespace) -> str | None:
    """Message that no step is left to make, with the remedy; None if a step is left."""
    if start is None or (done := _done(start, args)) is None:
        return None
    return (
        f"{start.saved.folder.parent} is finished: it holds {done.reached}, and {done.limit} "
        f"leaves no step. {done.remedy} to continue, or name another --save for a new run."
    )


def no_step_elsewhere(start: StartingPoint | None, args: argparse.Namespace) -> list[str]:
    """Fault if --load names a finished run that leaves no step for another --save."""
    if start is None or not start.named or args.save is None:
        return []
    folder = start.saved.folder.parent
    if Path(args.save).resolve() == folder.resolve() or (done := _done(start, args)) is None:
        return []
    return [
        f"{start.given} holds {done.reached}, so {done.limit} leaves no steps for --save "
        f"{args.save}. {done.remedy}, or start a new run with its weights: "
        f"--pretrained-checkpoint {folder}"
    ]


@dataclass(frozen=True)
class _Done:
    """Progress of a run that has ended, the flag that ended it, and what to do to continue."""

    reached: str
    limit: str
    remedy: str


def _done(start: StartingPoint, args: argparse.Namespace) -> _Done | None:
    """End that the run has reached; None if a step is left."""
    saved = start.saved
    if not start.continued or args.skip_train:
        return None
    if (done := _target_reached(saved, args)) is not None:
        return done
    if args.train_samples is not None:
        if steps_left(args, saved.num_samples) > 0:
            return None
        limit = f"--train-samples {args.train_samples}"
        return _Done(f"{saved.num_samples} samples", limit, "Raise --train-samples")
    counted = args.override_ckpt_iteration
    if args.train_iters > (saved.iteration if counted is None else counted):
        return None
    limit = f"--train-iters {args.train_iters}"
    return _Done(f"iteration {saved.iteration}", limit, "Raise --train-iters")


def _target_reached(saved: SavedRun, args: argparse.Namespace) -> _Done | None:
    """End by the validation target, if the loss with which ``saved`` ended is of this validation
    and at most this target.
    """
    target = args.pulse_validation_target
    loss = getattr(saved.arguments, "pulse_reached_loss", None)
    if target is None or loss is None or loss > target:
        return None
    if saved.arguments.pulse_reached_by != describe_validation(args):
        return None
    reached = f"validation loss {loss:.6g} at iteration {saved.iteration}"
    return _Done(reached, f"--pulse-validation-target {target:g}", LOWER_TARGET)


LOWER_TARGET = "Lower --pulse-validation-target or leave it out"
"""Remedy for a run that ended by its target."""


def describe_validation(args: argparse.Namespace) -> str:
    """Description of a run's validation: losses of another are not compared."""
    data = args.pulse_validation_data or f"held back of {args.pulse_data}"
    return (
        f"{data}, {args.eval_iters} batches of {args.global_batch_size}, "
        f"times {args.pulse_validation_times}, seed {args.seed}"
    )


def steps_left(args: argparse.Namespace, num_samples: int) -> int:
    """Number of steps that ``--train-samples`` leaves after ``num_samples``."""
    return int((args.train_samples - num_samples) // args.global_batch_size)


def lock_for_job(save: str | None, found: str | None) -> FolderLock | None:
    """Lock ``save`` on rank 0 for the whole job (collective); None if there is nothing to lock.

    ``found`` is the ``newest_named`` that this rank read before. Raises FolderInUse on every rank
    if another run writes or has just written there. Also raised if ranks saw different folders, or
    if the folder cannot be written.
    """
    if save is None:
        return None
    lock, fault, rank = None, None, dist.get_rank()
    if rank == 0:
        try:
            lock = FolderLock(Path(save))
            if (now := newest_named(save)) != found:
                fault = f"another run has just saved {now} in {save}. Start this run again"
        except FolderInUse as error:
            fault = str(error)
        except OSError as error:
            fault = f"--save {save} cannot be written ({error.strerror}). Name a writable folder"
    told = gather_objects((fault, found))
    if (fault := told[0][0]) is None:
        others = [r for r, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        if others:
            fault = (
                f"--save {save}: rank {others[0]} finds {told[others[0]][1] or 'no'} checkpoint "
                f"there, rank 0 {told[0][1] or 'none'}. Use storage that all ranks share"
            )
    if fault is not None:
        if lock is not None:
            lock.release()
        raise FolderInUse(fault)
    return lock
