"""Checkpoints read from outside a training run: what they hold, and their weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.integration.arguments import add_pulse_arguments
from megatron_pulse.runtime.stage import Stage

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What Megatron calls a checkpoint without iteration, optimizer and random states."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


def checkpoint_folder(load: str | Path, iteration: int | None = None) -> Path:
    """The folder of the latest checkpoint (or of ``iteration``) below ``load``."""
    load = Path(load)
    latest = load / LATEST
    if iteration is None:
        if not latest.exists():
            raise CheckpointError(
                f"{load} holds no checkpoint: there is no {LATEST}; give the folder that "
                "--save named"
            )
        text = latest.read_text().strip()
        if text != RELEASE and not text.isdigit():
            raise CheckpointError(f"{latest} does not name an iteration: {text[:40]!r}")
        iteration = None if text == RELEASE else int(text)
    folder = load / (RELEASE if iteration is None else f"iter_{iteration:07d}")
    if not (folder / "metadata.json").exists():
        raise CheckpointError(f"{folder} is not a complete torch_dist checkpoint")
    return folder


def saved_arguments(folder: Path) -> argparse.Namespace:
    """The flags of the run that wrote the checkpoint."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(f"{folder} cannot be read: {_last_line(error)}") from error
    args = common.get("args")
    if args is None or not hasattr(args, "pulse_record"):
        raise CheckpointError(f"{folder} was not written by megatron_pulse")
    known = vars(add_pulse_arguments(argparse.ArgumentParser()).parse_args([]))
    for name, value in known.items():  # flags that are newer than the checkpoint
        if not hasattr(args, name):
            setattr(args, name, value)
    return args  # type: ignore[no-any-return]


def check_checkpoint(
    load: str, record: Mapping[str, Any], ema_decay: float, iteration: int | None = None
) -> list[str]:
    """Why the checkpoint below ``load`` cannot continue as this backbone; empty if it can.

    A folder without any checkpoint is fine: that is how the first start of a run looks.
    """
    if not (Path(load) / LATEST).exists():
        return []
    try:
        args = saved_arguments(checkpoint_folder(load, iteration))
    except CheckpointError as error:
        return [str(error)]
    saved, wanted = args.pulse_record["options"], record["options"]
    different = [
        f"{key} is {saved.get(key)!r} there and {wanted.get(key)!r} here"
        for key in sorted({*saved, *wanted})
        if saved.get(key) != wanted.get(key)
    ]
    faults = []
    if args.pulse_record.get("family") != record["family"] or different:
        faults.append(
            f"--load {load} holds another backbone ({args.pulse_record['name']}, not "
            f"{record['name']}): {'; '.join(different)}"
        )
    if ema_decay and not args.pulse_ema_decay:
        faults.append(f"--load {load} holds no averaged weights: continue with --pulse-ema-decay 0")
    return faults


def load_weights(stage: Stage, folder: Path, *, averaged: bool) -> None:
    """Fill ``stage`` from a checkpoint, with the averaged weights if ``averaged``.

    Raises CheckpointError if the files are damaged or hold other weights.
    """
    # Extra states belong to Transformer Engine's fp8 recipes; weights do not depend on them.
    names = {name for name in stage.state_dict() if not name.endswith("_extra_state")}
    state = {name: entry for name, entry in stage.sharded_state_dict().items() if name in names}
    if averaged:
        for name, _ in stage.named_parameters():
            state[name].key = f"ema.{state[name].key}"
    try:
        loaded = dist_checkpointing.load({"model": state}, str(folder))["model"]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"the weights in {folder} cannot be read: {_last_line(error)}"
        ) from error
    stage.load_state_dict(loaded, strict=False)
    if missing := names - set(loaded):
        raise CheckpointError(f"{folder} lacks {', '.join(sorted(missing))}")


def _last_line(error: BaseException) -> str:
    """The reason at the end of a message that may hold another rank's traceback."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
