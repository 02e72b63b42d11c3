"""Frozen weights that a checkpoint leaves out, because they are in a diffusers folder.

A run of an adapter on ``diffusers:FOLDER`` saves the adapter alone. It records the folder, with a
digest of its weights.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_pulse.diffusion.published import read_folder
from megatron_pulse.errors import UserError
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from model_specs import weights_folder

_ENDS = 4096
"""Bytes at either end of a tensor that its digest covers."""


@dataclass(frozen=True)
class FrozenWeights:
    """Diffusers component with the frozen weights of a run."""

    folder: str
    digest: str

    @classmethod
    def of_run(cls, options: PulseOptions) -> FrozenWeights | None:
        """Frozen weights of a run with these options; None if checkpoints must hold them."""
        if options.adapter.record is None or options.train:
            return None
        folder = weights_folder(options.backbone or "")
        return None if folder is None else cls(str(folder.absolute()), digest_of(folder))

    @classmethod
    def of_checkpoint(cls, args: argparse.Namespace) -> FrozenWeights | None:
        """Frozen weights that a checkpoint with these flags leaves out, if any."""
        kept: dict[str, Any] | None = getattr(args, "pulse_frozen_weights", None)
        return None if kept is None else cls(**kept)

    def to_record(self) -> dict[str, str]:
        """Values for the flags in a checkpoint; ``of_checkpoint`` takes them back."""
        return asdict(self)

    def located(self, folder: Path | None = None) -> Path:
        """Folder of these weights, in its place or in ``folder``.

        Raises UserError if it is gone, or holds other weights.
        """
        place = Path(self.folder) if folder is None else folder
        remedy = "give --frozen-weights DIR, the folder of a pipeline or component with them"
        found = weights_folder(f"diffusers:{place}")
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
