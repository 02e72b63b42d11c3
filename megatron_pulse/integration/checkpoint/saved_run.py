"""Access to checkpoints from outside a training run: their flags, contents and weights."""

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
from megatron_pulse.backbone.recorded_sizes import with_options
from megatron_pulse.data.build import data_of_chains, encoders_of_chains, several_parts
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.tokens import recorded_by
from megatron_pulse.errors import format_faults
from megatron_pulse.integration.checkpoint.diffusion_process import saved_process
from megatron_pulse.integration.checkpoint.folders import (
    RELEASE,
    CheckpointError,
    DamagedError,
    MovedError,
    Step,
    checkpoint_folder,
    step_folder,
)
from megatron_pulse.integration.checkpoint.frozen_weights import FrozenWeights
from megatron_pulse.integration.checkpoint.integrity.saved_flags import find_flag_faults, is_ours
from megatron_pulse.integration.checkpoint.integrity.verify import (
    damaged,
    require_intact,
    require_readable,
)
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments
from megatron_pulse.integration.megatron.stage import EMA, REFERENCE, MegatronStage
from megatron_pulse.profile.trainable import TrainedPart, trained_part
from model_specs import (
    DTYPE,
    compare_models,
    continue_model,
    in_dtype,
    is_cascade,
    part_record,
    trained_as,
)
from model_specs.derived.names import parts_of

_REFUSED = "Check the documentation of torch.load"
"""Part of torch's message about a pickle that it refuses."""


@dataclass(frozen=True)
class SavedRun:
    """Checkpoint and the run that wrote it.

    Training, ``pulse sample`` and ``pulse export`` know a checkpoint through this value alone.
    """

    folder: Path
    """Folder of the checkpoint, inside the folder of ``--save``."""
    arguments: argparse.Namespace
    """Flags of the run; flags newer than the checkpoint have their defaults."""
    chain: str = ""
    """Selected chain of a cascade, which prefixes the names of its weights; empty for none."""
    frozen_folder: Path | None = None
    """Present place of the frozen weights that the checkpoint leaves out, if it was given."""

    def of_chain(self, chain: str | None) -> SavedRun:
        """One chain of a cascade, as if trained alone; any other run unchanged.

        Raises CheckpointError if a cascade's chain is not named, or a named chain does not exist.
        """
        cascade = is_cascade(self.record["name"])
        if not cascade and chain is None:
            return self
        if not cascade or chain is None:
            parts = ", ".join(parts_of(self.record["name"])) if cascade else ""
            what = f"a cascade. Name one of its chains: --chain ({parts})"
            raise CheckpointError(
                f"{self.folder} holds {what if cascade else 'no cascade: leave out --chain'}"
            )
        arguments = argparse.Namespace(**vars(self.arguments))
        try:
            arguments.pulse_record = part_record(self.record, chain)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        chains = list(parts_of(self.record["name"]))
        if self.boundary is not None:
            processes = dict(zip(chains, self.process.experts(self.boundary), strict=True))
            arguments.pulse_process = processes[chain].to_dict()
        if (frozen := self.frozen_weights) is not None:
            arguments.pulse_frozen_weights = frozen.of_chain(chain).to_record()
        if arguments.pulse_data is not None:
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
        """True if the checkpoint holds weights only, as ``pulse import`` writes them."""
        return self.folder.name == RELEASE

    @property
    def iteration(self) -> int:
        """Number of training steps made; 0 for imported weights."""
        return 0 if self.released else int(self.folder.name.removeprefix("iter_"))

    @property
    def num_samples(self) -> int:
        """Number of samples trained on."""
        return int(getattr(self.arguments, "consumed_train_samples", 0))

    @property
    def record(self) -> Mapping[str, Any]:
        """Family, name and options of the backbone."""
        return self.arguments.pulse_record  # type: ignore[no-any-return]

    @property
    def process(self) -> DiffusionProcess:
        """Diffusion process of the training."""
        return saved_process(self.arguments)

    @property
    def boundary(self) -> float | None:
        """Share of the process where the two experts of a cascade meet; None without experts."""
        return self.arguments.pulse_boundary_ratio if is_cascade(self.record["name"]) else None

    @property
    def base_pipelines(self) -> list[Path]:
        """Pipeline folders that the run knows: of its encoders, of its imported weights and of its
        frozen weights."""
        args = self.arguments
        known = [getattr(args, name, None) for name in ("pulse_encoders", "pulse_base")]
        found = [Path(folder) for folder in known if folder]
        if self.frozen_weights is not None:
            pipeline = Path(self.frozen_weights.folder).parent
            found += [pipeline] * (pipeline / PIPELINE_INDEX).is_file()
        return list(dict.fromkeys(found))

    @property
    def has_ema(self) -> bool:
        """True if the checkpoint holds an EMA of the weights."""
        return bool(self.arguments.pulse_ema_decay)

    @property
    def has_reference(self) -> bool:
        """True if the checkpoint holds the weights of a preference loss's reference."""
        names = dist_checkpointing.load_tensors_metadata(str(self.folder))
        return any(name.startswith(REFERENCE) for name in names)

    @property
    def has_optimizer(self) -> bool:
        """True if the checkpoint holds the states of optimizer and learning-rate schedule."""
        return not (self.released or getattr(self.arguments, "no_save_optim", False))

    @property
    def frozen_weights(self) -> FrozenWeights | None:
        """Frozen weights that the checkpoint leaves out, if any."""
        return FrozenWeights.of_checkpoint(self.arguments)

    def load_backbone(
        self, options: Mapping[str, str] = MappingProxyType({}), *, quantized: bool = True
    ) -> Backbone:
        """Build the run's backbone in fp32, with ``options`` changed, and with its adapter.

        Its layers begin with the frozen weights that the checkpoint leaves out, quantised as in the
        run if ``quantized``. Raises
        CheckpointError for options that would make another model, ValueError for invalid ones, and
        UserError if the frozen weights are gone.
        """
        theirs = self.record
        name = theirs["name"]
        if (frozen := self.frozen_weights) is not None and not frozen.imported:
            name = f"diffusers:{frozen.located(self.frozen_folder)}"
        kept = {key: value for key, value in theirs["options"].items() if key != DTYPE}
        wanted = in_dtype(name, with_options(kept, options), "float32", "it")
        backbone = continue_model(theirs, name, wanted)
        if different := compare_models(theirs, backbone.record).different:
            raise CheckpointError(
                format_faults(
                    f"{self.folder} holds another model than these options describe", different
                )
            )
        part = trained_part(theirs)
        kept_part = TrainedPart((), (), part.adapter, part.quantization if quantized else None)
        return trained_as(backbone, kept_part, quantized_from=theirs["options"].get(DTYPE))


def read_saved_run(
    load: str | Path, iteration: Step | None = None, frozen_folder: Path | None = None
) -> SavedRun:
    """Read the latest checkpoint in ``load``, or that of ``iteration`` (a step, or "best").

    ``frozen_folder`` is the present place of frozen weights that it leaves out.
    Raises CheckpointError if there is none, or if another program wrote it. Raises DamagedError if
    it is incomplete, or if the parts read here are damaged. ``require_intact`` reads all parts.
    """
    folder = checkpoint_folder(load, iteration)
    require_readable(folder)
    common = read_common(folder)
    if not is_ours(common):
        raise CheckpointError(f"{folder} was not written by megatron_pulse")
    args = common["args"]
    if not hasattr(args, "pulse_bucket_batch") and several_parts(args.pulse_data):
        args.pulse_bucket_batch = args.micro_batch_size  # value in effect before the flag existed
    known = vars(add_pulse_arguments(argparse.ArgumentParser()).parse_args([]))
    for name, value in known.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    if faults := list(find_flag_faults(args)):
        raise damaged(folder, faults)
    require_in_place(folder, common)
    return SavedRun(folder, args, frozen_folder=frozen_folder)


def read_common(folder: Path) -> dict[str, Any]:
    """Read the flags and counts that a checkpoint holds beside its tensors; raises DamagedError."""
    try:
        return dist_checkpointing.load_common_state_dict(str(folder))  # type: ignore[no-any-return]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise DamagedError(f"{folder} cannot be read: {last_line(error)}") from error


def require_in_place(folder: Path, common: Mapping[str, Any]) -> None:
    """Raise MovedError if the folder's name is of another step than its ``common`` state."""
    held = common.get("iteration")
    if folder.name != RELEASE and held is not None and step_folder(held) != folder.name:
        raise MovedError(folder, held)


def load_weights(
    stage: MegatronStage, saved: SavedRun, *, averaged: bool, frozen: bool = True
) -> None:
    """Fill ``stage`` from a checkpoint, with EMA weights if ``averaged``.

    Frozen parameters have no EMA and keep their plain values. Those that the checkpoint leaves out
    keep the stage's, or are read from the imported weights. Without ``frozen``, none are read.
    ``stage`` may be of one chain of a cascade. Raises CheckpointError if the files are damaged or
    hold other weights, and UserError if imported weights are gone.
    """
    folder, chain = saved.folder, saved.chain
    if not frozen:
        stage.left_out = stage.frozen_names
    elif (base := saved.frozen_weights) is not None:
        stage.left_out = stage.frozen_names
        if base.imported:
            load_frozen(stage, base.located(saved.frozen_folder))
    # Extra states belong to Transformer Engine's fp8 recipes; weights do not depend on them.
    names = {name for name in stage.state_dict() if not name.endswith("_extra_state")}
    names -= stage.left_out
    state = {name: entry for name, entry in stage.sharded_state_dict().items() if name in names}
    if chain:
        for entry in state.values():
            entry.key = f"{chain}.{entry.key}"
    try:
        if averaged:
            known = dist_checkpointing.load_tensors_metadata(str(folder))
            for name, _ in stage.named_parameters():
                if name in state and (key := f"{EMA}{state[name].key}") in known:
                    state[name].key = key
        loaded = dist_checkpointing.load({"model": state}, str(folder))["model"]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"the weights in {folder} cannot be read: {last_line(error)}"
        ) from error
    stage.load_state_dict(loaded, strict=False)
    if missing := names - set(loaded):
        raise CheckpointError(f"{folder} lacks {', '.join(sorted(missing))}")


def require_whole(saved: SavedRun, *, frozen: bool = True) -> None:
    """Raise DamagedError unless a checkpoint, and an import that it leaves out, are as written.

    Without ``frozen``, the import is not read. Collective once the process group exists.
    """
    require_intact(saved.folder)
    if frozen and (base := saved.frozen_weights) is not None and base.imported:
        require_intact(base.located(saved.frozen_folder))


def load_frozen(stage: MegatronStage, folder: Path) -> None:
    """Fill the frozen parameters of ``stage`` from the checkpoint in ``folder``.

    Collective over the ranks of a job. Raises CheckpointError if it cannot be read.
    """
    left_out, stage.left_out = stage.left_out, frozenset()
    frozen = stage.frozen_names
    state = {name: entry for name, entry in stage.sharded_state_dict().items() if name in frozen}
    stage.left_out = left_out
    try:
        loaded = dist_checkpointing.load({"model": state}, str(folder))["model"]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"the frozen weights in {folder} cannot be read: {last_line(error)}"
        ) from error
    stage.load_frozen(loaded)


def last_line(error: BaseException) -> str:
    """Reason in an error message, usually its last line.

    A message may begin with another rank's traceback. Torch's message on a refused pickle has its
    reason inside.
    """
    if _REFUSED in str(error):
        named = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
        what = (
            f"names {named[1]}, which is not allowed in a checkpoint"
            if named
            else ("was not written by torch.save")
        )
        return f"a pickle in it {what}"
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
