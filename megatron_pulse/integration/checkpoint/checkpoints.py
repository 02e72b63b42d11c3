"""Checkpoints read from outside a training run: what they hold, and their weights."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import data_of_chains, encoders_of_chains, several_parts
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.encoders.tokens import recorded_by
from megatron_pulse.faults import told
from megatron_pulse.integration.checkpoint.folders import (
    RELEASE,
    CheckpointError,
    DamagedError,
    MovedError,
    checkpoint_folder,
    step_folder,
)
from megatron_pulse.integration.checkpoint.integrity.common import find_flag_faults, is_ours
from megatron_pulse.integration.checkpoint.integrity.verify import damaged, require_readable
from megatron_pulse.integration.checkpoint.process import saved_process
from megatron_pulse.integration.flags.arguments import add_pulse_arguments
from megatron_pulse.integration.megatron.stage import MegatronStage
from model_specs import DTYPE, compare_models, continue_model, in_dtype, is_cascade, part_record
from model_specs.derived.cascades import parts_of

_REFUSED = "Check the documentation of torch.load"
"""In what torch says of a pickle that it refuses."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and the run that wrote it.

    Training continues it or takes its weights, ``pulse sample`` draws from it, ``pulse export``
    writes it out: all know it through this value alone.
    """

    folder: Path
    """The checkpoint's own folder, below the one that ``--save`` named."""
    arguments: argparse.Namespace
    """The flags of the run; those that are newer than the checkpoint have their defaults."""
    chain: str = ""
    """Which of a cascade's chains is meant; its weights' names begin so there."""

    def of_chain(self, chain: str | None) -> SavedRun:
        """One chain of a cascade, as if it had been trained alone; any other run as it is.

        Raises CheckpointError where a cascade's chain is not named, and for one that is not there.
        """
        cascade = is_cascade(self.record["name"])
        if not cascade and chain is None:
            return self
        if not cascade or chain is None:
            parts = ", ".join(parts_of(self.record["name"])) if cascade else ""
            what = f"a cascade: name one with --chain ({parts})"
            raise CheckpointError(
                f"{self.folder} is of {what if cascade else 'no cascade: leave out --chain'}"
            )
        arguments = argparse.Namespace(**vars(self.arguments))
        try:
            arguments.pulse_record = part_record(self.record, chain)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        if arguments.pulse_data is not None:
            chains = list(parts_of(self.record["name"]))
            arguments.pulse_data = data_of_chains(arguments.pulse_data, chains)[chain]
            used = getattr(arguments, "pulse_encoders", None)
            arguments.pulse_encoders = encoders_of_chains(used, chains)[chain]
            by = recorded_by(arguments)
            mine = [name for name in by if name.startswith(f"{chain}.")]
            read = getattr(arguments, "pulse_data_record", None) or {}
            arguments.pulse_data_record = {"": read[chain]} if chain in read else {}
            arguments.pulse_encoded_by = {n.removeprefix(f"{chain}."): by[n] for n in mine}
        return replace(self, arguments=arguments, chain=chain)

    @property
    def released(self) -> bool:
        """Whether it holds weights alone, as ``pulse import`` writes them."""
        return self.folder.name == RELEASE

    @property
    def iteration(self) -> int:
        """How many steps were made; 0 for imported weights."""
        return 0 if self.released else int(self.folder.name.removeprefix("iter_"))

    @property
    def num_samples(self) -> int:
        """How many samples were trained on."""
        return int(getattr(self.arguments, "consumed_train_samples", 0))

    @property
    def record(self) -> Mapping[str, Any]:
        """Family, name and options of the backbone."""
        return self.arguments.pulse_record  # type: ignore[no-any-return]

    @property
    def process(self) -> DiffusionProcess:
        """The diffusion process that it was trained as."""
        return saved_process(self.arguments)

    @property
    def has_averages(self) -> bool:
        """Whether it holds averaged weights."""
        return bool(self.arguments.pulse_ema_decay)

    @property
    def has_optimizer(self) -> bool:
        """Whether it holds the states of the optimizer and of the learning-rate schedule."""
        return not (self.released or getattr(self.arguments, "no_save_optim", False))

    def load_backbone(self, options: Mapping[str, str] = MappingProxyType({})) -> Backbone:
        """The backbone as the run had it, in fp32, but for ``options`` that make no other model.

        Raises CheckpointError for those that would, and ValueError for faulty ones.
        """
        theirs = self.record
        kept = {key: value for key, value in theirs["options"].items() if key != DTYPE}
        wanted = in_dtype(theirs["name"], {**kept, **options}, "float32", "it")
        backbone = continue_model(theirs, theirs["name"], wanted)
        if different := compare_models(theirs, backbone.record).different:
            raise CheckpointError(
                told(f"{self.folder} holds another model than these options make", different)
            )
        return backbone


def read_saved_run(load: str | Path, iteration: int | None = None) -> SavedRun:
    """What the latest checkpoint (or that of ``iteration``) below ``load`` is.

    Raises CheckpointError if there is none, or another program wrote it, DamagedError if it is not
    complete or damaged as far as this reads it (``require_whole`` reads all).
    """
    folder = checkpoint_folder(load, iteration)
    require_readable(folder)
    common = read_common(folder)
    if not is_ours(common):
        raise CheckpointError(f"{folder} was not written by megatron_pulse")
    args = common["args"]
    if not hasattr(args, "pulse_bucket_batch") and several_parts(args.pulse_data):
        args.pulse_bucket_batch = args.micro_batch_size  # in a row, before there was the flag
    known = vars(add_pulse_arguments(argparse.ArgumentParser()).parse_args([]))
    for name, value in known.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    if faults := list(find_flag_faults(args)):
        raise damaged(folder, faults)
    require_in_place(folder, common)
    return SavedRun(folder, args)


def read_common(folder: Path) -> dict[str, Any]:
    """The flags and counts that the checkpoint in ``folder`` has beside its tensors; raises
    DamagedError."""
    try:
        return dist_checkpointing.load_common_state_dict(str(folder))  # type: ignore[no-any-return]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise DamagedError(f"{folder} cannot be read: {last_line(error)}") from error


def require_in_place(folder: Path, common: Mapping[str, Any]) -> None:
    """Raise MovedError where ``folder`` is called by another step than its ``common`` state."""
    held = common.get("iteration")
    if folder.name != RELEASE and held is not None and step_folder(held) != folder.name:
        raise MovedError(folder, held)


def load_weights(stage: MegatronStage, folder: Path, *, averaged: bool, chain: str = "") -> None:
    """Fill ``stage`` from a checkpoint, with the averaged weights if ``averaged``; what was frozen
    has no average, and is what it was. ``stage`` may be that of one ``chain`` of a cascade.

    Raises CheckpointError if the files are damaged or hold other weights.
    """
    # Extra states belong to Transformer Engine's fp8 recipes; weights do not depend on them.
    names = {name for name in stage.state_dict() if not name.endswith("_extra_state")}
    state = {name: entry for name, entry in stage.sharded_state_dict().items() if name in names}
    if chain:
        for entry in state.values():
            entry.key = f"{chain}.{entry.key}"
    try:
        if averaged:
            known = dist_checkpointing.load_tensors_metadata(str(folder))
            for name, _ in stage.named_parameters():
                if (key := f"ema.{state[name].key}") in known:
                    state[name].key = key
        loaded = dist_checkpointing.load({"model": state}, str(folder))["model"]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"the weights in {folder} cannot be read: {last_line(error)}"
        ) from error
    stage.load_state_dict(loaded, strict=False)
    if missing := names - set(loaded):
        raise CheckpointError(f"{folder} lacks {', '.join(sorted(missing))}")


def last_line(error: BaseException) -> str:
    """The reason at the end of a message that may hold another rank's traceback; torch's, of what
    it does not unpickle, is not at the end."""
    if _REFUSED in str(error):
        named = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
        what = (
            f"names {named[1]}, which no checkpoint needs" if named else "is none of torch.save's"
        )
        return f"a pickle in it {what}"
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
