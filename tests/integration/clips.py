"""Latents of small clips, with text states of Wan's small configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter

SHAPE = (4, 2, 4, 4)


def write_clips(folder: Path) -> None:
    """Write twenty clips, each of one value."""
    text = torch.randn(20, 6, 8, generator=torch.Generator().manual_seed(1))
    layout = LatentLayout(SHAPE, 1, LatentType.FLOAT32, {"context": FieldSpec((6, 8))})
    with LatentWriter(folder, layout, {}, 20) as writer:
        for number in writer.share(0, 1):
            for i in writer.begin(number):
                writer.add(torch.full(SHAPE, 0.1 * i), 0, {"context": text[i]})
