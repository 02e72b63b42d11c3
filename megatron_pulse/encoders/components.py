"""What a diffusers pipeline folder holds, read from configurations and heads of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_pulse.backbone.published import PublishedError
from megatron_pulse.diffusion.published import STEMS, read_folder
from megatron_pulse.diffusion.scheduler import PIPELINE_INDEX
from megatron_pulse.encoders.recipe import VAE
from megatron_pulse.encoders.tokens import require
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json
from megatron_pulse.named_files import is_file_name


@dataclass(frozen=True)
class PipelineComponent:
    """A part of a pipeline: its folder's name and its class, of ``library``.

    Of one with weights, how many ``num_parameters`` in how many bytes, and their types
    (``float16``; ``float16, float32`` where they differ). ``fault`` is why it cannot be read.
    """

    name: str
    class_name: str
    library: str
    num_parameters: int = 0
    num_bytes: int = 0
    dtype: str = ""
    fault: str = ""


def components(folder: Path) -> list[PipelineComponent]:
    """Those that ``model_index.json`` names, in its order; no weights are read. Raises
    EncodersError if there is no such file."""
    try:
        index = read_json(folder / PIPELINE_INDEX, FileKind.PIPELINE)
    except FileError as error:
        require(folder, [str(error)])
        raise
    return list(_components(folder, index))


def autoencoder_faults(folder: Path) -> list[str]:
    """Why the autoencoder that ``model_index.json`` names cannot be read; none if it names none."""
    if not (folder / PIPELINE_INDEX).is_file():
        return []
    amiss = [part.fault for part in components(folder) if part.name == VAE and part.fault]
    return [f"{VAE}: {fault}, and {PIPELINE_INDEX} names it: fetch it anew" for fault in amiss]


def weight_faults(folder: Path, names: Sequence[str]) -> list[str]:
    """Faults of these components' weights, from the heads of their files."""
    faults = []
    for name in names:
        library = "diffusers" if name == VAE else "transformers"
        where = folder / name
        if not where.is_dir():
            continue
        if fault := _weighed(where, "", library).fault:
            told = fault if fault.startswith(name) else f"{name}: {fault}"
            faults.append(f"{folder}: {told}; fetch the file anew")
    return faults


def _components(folder: Path, index: dict[str, object]) -> Iterator[PipelineComponent]:
    for name, said in index.items():
        if not isinstance(said, list) or len(said) != 2 or None in said:
            continue  # a setting, or a part that this pipeline does without
        library, class_name = map(str, said)
        where = folder / name
        if not is_file_name(name):
            fault = f"{repr(name)[:80]} is not the name of a folder in {folder}"
            yield PipelineComponent(name, class_name, library, fault=fault)
        elif not where.is_dir():
            yield PipelineComponent(name, class_name, library, fault="there is no such folder")
        elif (where / "config.json").is_file() and library in STEMS:
            yield _weighed(where, class_name, library)
        else:
            fault = "config.json is missing" if _has_config(name, library) else ""
            yield PipelineComponent(name, class_name, library, fault=fault)


def _has_config(name: str, library: str) -> bool:
    return library in STEMS and name.startswith((VAE, "text_encoder", "unet", "transformer"))


def _weighed(where: Path, class_name: str, library: str) -> PipelineComponent:
    try:
        tensors = read_folder(where, library=library)
    except PublishedError as error:
        fault = str(error).replace(f"{where}", where.name)
        return PipelineComponent(where.name, class_name, library, fault=fault)
    kinds = [tensors.kind_of(name) for name in tensors]
    return PipelineComponent(
        where.name,
        class_name,
        library,
        sum(prod(shape) for shape, _ in kinds),
        sum(prod(shape) * dtype.itemsize for shape, dtype in kinds),
        ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in kinds})),
    )
