"""Components of a diffusers pipeline folder, read from configurations and file headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.diffusion.published import STEMS, read_folder
from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.text_recipe import CONNECTORS, VAE
from megatron_pulse.encoders.tokens import require
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json
from megatron_pulse.paths import is_file_name

_FILES_AS = {"kolors": "transformers", "ltx2": "diffusers"}
"""Library whose file names a pipeline's own components have, by the name of the pipeline."""


@dataclass(frozen=True)
class PipelineComponent:
    """Component of a pipeline: folder name, class and library.

    For a component with weights: ``num_parameters``, their bytes and their types (``float16``;
    ``float16, float32`` if mixed). ``fault`` explains an unreadable component.
    """

    name: str
    class_name: str
    library: str
    num_parameters: int = 0
    num_bytes: int = 0
    dtype: str = ""
    fault: str = ""


def components(folder: Path) -> list[PipelineComponent]:
    """Components named in ``model_index.json``, in its order; no weights are read.

    Raises EncodersError if the file is missing.
    """
    try:
        index = read_json(folder / PIPELINE_INDEX, FileKind.PIPELINE)
    except FileError as error:
        require(folder, [str(error)])
        raise
    return list(_components(folder, index))


def pipeline_folder_faults(folder: Path) -> list[str]:
    """Fault if ``folder`` is not that of a diffusers pipeline, to follow the flag's name."""
    if (folder / PIPELINE_INDEX).is_file():
        return []
    if (folder.parent / PIPELINE_INDEX).is_file():
        return [f"{folder} is a part of a pipeline's folder: give --encoders {folder.parent}"]
    return [f"{folder} holds no {PIPELINE_INDEX} of a diffusers pipeline"]


def autoencoder_faults(folder: Path) -> list[str]:
    """Faults of the autoencoder named in ``model_index.json``; none if no autoencoder is named."""
    if not (folder / PIPELINE_INDEX).is_file():
        return []
    amiss = [part.fault for part in components(folder) if part.name == VAE and part.fault]
    return [f"{VAE}: {fault}, but {PIPELINE_INDEX} names it. Download it again" for fault in amiss]


def weight_faults(folder: Path, names: Sequence[str]) -> list[str]:
    """Faults of the weights of the named components, from the headers of their files."""
    faults = []
    for name in names:
        library = "diffusers" if name in (VAE, CONNECTORS) else "transformers"
        where = folder / name
        if not where.is_dir():
            continue
        if fault := _weighed(where, "", library).fault:
            told = fault if fault.startswith(name) else f"{name}: {fault}"
            faults.append(f"{folder}: {told}. Download the file again")
    return faults


def _components(folder: Path, index: dict[str, object]) -> Iterator[PipelineComponent]:
    for name, said in index.items():
        if not isinstance(said, list) or len(said) != 2 or None in said:
            continue  # a setting, or an absent component
        library, class_name = map(str, said)
        where = folder / name
        if not is_file_name(name):
            fault = f"{repr(name)[:80]} is not a folder name in {folder}"
            yield PipelineComponent(name, class_name, library, fault=fault)
        elif not where.is_dir():
            yield PipelineComponent(name, class_name, library, fault="there is no such folder")
        elif (where / "config.json").is_file() and _FILES_AS.get(library, library) in STEMS:
            yield _weighed(where, class_name, library)
        else:
            fault = "config.json is missing" if _has_config(name, library) else ""
            yield PipelineComponent(name, class_name, library, fault=fault)


def _has_config(name: str, library: str) -> bool:
    parts = (VAE, "text_encoder", CONNECTORS, "unet", "transformer")
    return _FILES_AS.get(library, library) in STEMS and name.startswith(parts)


def _weighed(where: Path, class_name: str, library: str) -> PipelineComponent:
    try:
        tensors = read_folder(where, library=_FILES_AS.get(library, library))
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
