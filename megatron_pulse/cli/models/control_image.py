"""Input of ``pulse sample --control-image``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.errors import UserError, collecting, summarize

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.backbone.chain import Backbone


def controlled(
    files: Sequence[Path], backbone: Backbone, rows: list[Any], each: int
) -> tuple[list[Any], dict[str, Tensor]]:
    """Rows of a sheet, and the control branch's field for ``each`` samples of every row.

    One file serves all rows; several files are one per row. A single row is repeated for every
    file. Raises UserError for other counts, or if the backbone has no control branch.
    """
    if not files:
        return rows, {}
    import torch

    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.images.conditioning import CONDITIONING, control_picture

    if CONDITIONING not in backbone.batch_fields:
        raise UserError(f"--control-image: {backbone.name} has no control branch: leave it out")
    rows = rows * len(files) if len(rows) == 1 else rows
    files = [*files] * len(rows) if len(files) == 1 else files
    if len(files) != len(rows):
        raise UserError(
            f"--control-image: {len(files)} pictures for {len(rows)} rows: give one, or as many"
        )
    spec = FieldSpec(backbone.batch_fields[CONDITIONING].shape)
    pictures: dict[Path, Tensor] = {}
    faults: list[str] = []
    for file in dict.fromkeys(files):
        with collecting(faults):
            pictures[file] = control_picture(file, spec)
    if faults:
        raise UserError(summarize(faults))
    seen = torch.stack([pictures[file] for file in files])
    return rows, {CONDITIONING: seen.repeat_interleave(each, 0)}
