"""Frozen weights that a checkpoint leaves out, because a diffusers folder or an import holds them.

A run of an adapter on ``diffusers:FOLDER``, or on what ``pulse import`` made, saves the adapter
alone. It records where the weights are, with a digest of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_pulse.diffusion.published import read_folder
from megatron_pulse.errors import Faults, UserError
from megatron_pulse.integration.checkpoint.folders import (
    RELEASE,
    CheckpointError,
    checkpoint_folder,
)
from megatron_pulse.integration.checkpoint.integrity.hashes import read_hashes
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from model_specs import weights_folder, weights_folders

_TENSORS = ".distcp"
"""Suffix of files that hold tensors."""
_ENDS = 4096
"""Bytes at either end of a tensor that its digest covers."""
_SECOND = "transformer_2"
"""Folder of a pipeline's second expert."""


@dataclass(frozen=True)
class FrozenWeights:
    """Diffusers component, or ``imported`` weights, with the frozen weights of a run.

    ``chains`` has those of each chain of a cascade.
    """

    folder: str
    digest: str
    imported: bool = False
    chains: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_run(
        cls,
        options: PulseOptions,
        known: FrozenWeights | None = None,
        imported: Path | None = None,
        pretrained: str | None = None,
    ) -> FrozenWeights | None:
        """Frozen weights of a run with these options; None if checkpoints must hold them.

        The run begins with a checkpoint that leaves out the ``known`` ones, or with what was
        ``imported``. ``pretrained`` is a folder that may hold imported weights if they have moved.
        Raises UserError if they are gone.
        """
        if options.adapter.record is None or options.train:
            return None
        folders = weights_folders(options.backbone or "")
        found = {
            chain: cls(str(folder.absolute()), digest_of(folder))
            for chain, folder in folders.items()
            if folder is not None
        }
        if found.keys() == folders.keys():
            return found[""] if "" in found else cls._of_chains(found)
        if known is not None:
            return known._moved(pretrained) if known.imported else None
        if imported is None:
            return None
        return cls(str(imported.absolute()), _digest_of_imported(imported), imported=True)

    @classmethod
    def _of_chains(cls, parts: Mapping[str, FrozenWeights]) -> FrozenWeights:
        folders = ", ".join(dict.fromkeys(part.folder for part in parts.values()))
        digest = ",".join(part.digest for part in parts.values())
        return cls(folders, digest, chains={c: part.to_record() for c, part in parts.items()})

    def of_chain(self, chain: str) -> FrozenWeights:
        """Frozen weights of one chain of a cascade."""
        return FrozenWeights(**self.chains[chain])

    def _moved(self, pretrained: str | None) -> FrozenWeights:
        """These imported weights where they are now: in ``pretrained``, or in their place."""
        place = None
        if pretrained is not None:
            with suppress(UserError):  # it may hold other weights: the name of another start
                place = self.located(Path(pretrained))
        place = place or self.located()
        return FrozenWeights(str(place.absolute()), self.digest, imported=True)

    @classmethod
    def of_checkpoint(cls, args: argparse.Namespace) -> FrozenWeights | None:
        """Frozen weights that a checkpoint with these flags leaves out, if any."""
        kept: dict[str, Any] | None = getattr(args, "pulse_frozen_weights", None)
        return None if kept is None else cls(**kept)

    def to_record(self) -> dict[str, Any]:
        """Values for the flags in a checkpoint; ``of_checkpoint`` takes them back."""
        return asdict(self)

    def located(self, folder: Path | None = None) -> Path:
        """Folder of these weights, in its place or in ``folder``.

        Raises UserError if it is gone, or holds other weights.
        """
        place = Path(self.folder) if folder is None else folder
        if self.imported:
            return self._located_import(place)
        remedy = "give --frozen-weights DIR, the folder of a pipeline or component with them"
        found = weights_folder(f"diffusers:{place}")
        second = weights_folder(f"diffusers:{place / _SECOND}")
        if second is not None and digest_of(second) == self.digest:
            return second
        if found is None:
            raise UserError(
                f"the frozen weights that the adapter was trained on were in {self.folder}; "
                f"{place} holds none: {remedy}"
            )
        if digest_of(found) != self.digest:
            raise UserError(
                f"the adapter was trained on the weights that {self.folder} held; {found} holds "
                f"others: {remedy}"
            )
        return found

    def _located_import(self, place: Path) -> Path:
        remedy = (
            "give their folder: --pretrained-checkpoint DIR in training, --frozen-weights DIR in "
            "commands"
        )
        try:
            found = place if place.name == RELEASE else checkpoint_folder(place)
            digest = _digest_of_imported(found)
        except (CheckpointError, OSError):
            raise UserError(
                f"the adapter was trained on the weights that 'pulse import' wrote to "
                f"{self.folder}; {place} holds none: {remedy}"
            ) from None
        if digest != self.digest:
            raise UserError(
                f"the adapter was trained on the weights that {self.folder} held; {found} holds "
                f"others: {remedy}"
            )
        return found


def _digest_of_imported(folder: Path) -> str:
    """Digest of the hashes of a checkpoint's tensors, which ``require_intact`` compares with them.

    An import of equal weights has an equal digest. Raises CheckpointError for damaged hashes.
    """
    try:
        hashes = read_hashes(folder) or {}
    except Faults as error:
        raise CheckpointError(f"{folder}: {error}") from error
    told = sorted(f"{name} {hashed}" for name, hashed in hashes.items() if name.endswith(_TENSORS))
    if not told:
        raise CheckpointError(f"{folder} has no hashes of its tensors")
    return str(xxhash.xxh3_128("\n".join(told).encode()).hexdigest())


def digest_of(folder: Path) -> str:
    """Digest of a component's weights: names, types and shapes, and both ends of each tensor.

    It reads some kilobytes of each tensor, so that it is quick for any model.
    """
    digest, tensors = xxhash.xxh3_128(), read_folder(folder, any_layout=True)
    for name in sorted(tensors):
        shape, dtype = tensors.kind_of(name)
        digest.update(f"{name} {dtype} {shape}".encode())
        flat = tensors[name].reshape(-1)
        count = max(1, _ENDS // flat.element_size())
        for end in (flat[:count], flat[-count:]):
            digest.update(end.contiguous().view(torch.uint8).numpy().tobytes())
    return str(digest.hexdigest())
