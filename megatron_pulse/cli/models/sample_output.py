"""Outputs of ``pulse sample -o``: a sheet, pictures of their own size, or samples as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.flag_checks import check_file, check_folder
from megatron_pulse.encoders.sample_decoder import (
    SampleDecoder,
    write_animation,
    write_folder,
    write_sheet,
)
from megatron_pulse.files import replacing

if TYPE_CHECKING:
    from torch import Tensor


class Output(StrEnum):
    """Kind of output that a path of ``-o`` asks for."""

    SHEET = "a sheet"
    ANIMATION = "an animated sheet"
    FOLDER = "a folder of pictures"
    TENSORS = "samples as tensors"


def output_of(path: Path) -> Output:
    """Kind of output by the file's suffix; a folder without one."""
    endings = {".png": Output.SHEET, ".safetensors": Output.TENSORS}
    endings |= dict.fromkeys((".gif", ".mp4"), Output.ANIMATION)
    return endings.get(path.suffix.lower(), Output.FOLDER)


def output_faults(path: Path, flag: str) -> list[str]:
    """Faults of a path that cannot be written; creates nothing."""
    if output_of(path) is not Output.FOLDER:
        return check_file(path, flag, path.suffix.lower())
    if path.suffix[1:].isalpha() and not path.is_dir():
        ends = (
            ".png (a sheet), .gif or .mp4 (videos), .safetensors (tensors), or nothing (a folder "
            "of pictures)"
        )
        return [f"{flag} {path}: the name must end in {ends}"]
    if path.exists() and not path.is_dir():
        return [f"{flag} {path} is a file; name a new folder"]
    if path.is_dir() and any(path.iterdir()):
        return [f"{flag} {path} exists and is not empty; name a new folder"]
    return check_folder(path.parent, flag)


def write_tensors(samples: Tensor, path: Path) -> dict[str, Any]:
    """Write the samples unchanged, as the tensor ``samples`` of a safetensors file."""
    from safetensors.torch import save_file

    with replacing(path) as beside:
        save_file({"samples": samples.contiguous()}, beside)
    return {"tensors": str(path)}


def writer_of(
    path: Path, drawing: SampleDecoder, columns: int, captions: Sequence[str], fps: float
) -> Callable[[Tensor], dict[str, Any]]:
    """Function that writes samples at ``path`` and returns the report's entries."""
    match output_of(path):
        case Output.TENSORS:
            return lambda samples: write_tensors(samples, path)
        case Output.FOLDER:
            return lambda samples: write_folder(drawing(samples), path)
        case Output.ANIMATION:
            return lambda samples: write_animation(drawing(samples), path, columns, captions, fps)
        case _:
            return lambda samples: write_sheet(drawing(samples), path, columns, captions)
