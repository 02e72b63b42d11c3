"""Export of a whole diffusers pipeline: a trained backbone among the components of its base.

base (encoders' folder, or the imported pipeline)          written folder
model_index.json, text_encoder*/, tokenizer*/, vae/  -->   hard links, or copies elsewhere
unet/ or transformer/, scheduler/                          those of the run
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.published_weights import Published, PublishedError
from megatron_pulse.diffusion.published import (
    CARD,
    COMPONENTS,
    require_loadable,
    write_component,
    write_json,
    write_scheduler,
)
from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.components import components, pipeline_folder_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json, replacing_folder

if TYPE_CHECKING:
    from torch import Tensor

SCHEDULER = "scheduler"
_LINKED_BYTES = 1 << 20
"""Files from this size on are hard links; smaller ones are copied, since people edit them."""


@dataclass(frozen=True)
class PipelineBase:
    """Pipeline folder whose other components an export takes over.

    ``backbone`` is the folder of the exported component in it, ``index`` its model_index.json.
    """

    folder: Path
    backbone: str
    index: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        """Class of the pipeline in diffusers."""
        return str(self.index.get("_class_name"))

    @property
    def others(self) -> tuple[str, ...]:
        """Components that are taken over."""
        return tuple(
            name
            for name, said in self.index.items()
            if isinstance(said, list) and None not in said and name not in self._own
        )

    @property
    def _own(self) -> tuple[str, str]:
        return self.backbone, SCHEDULER


def open_base(folder: Path, class_name: str) -> PipelineBase:
    """Base pipeline in ``folder`` for a backbone of ``class_name``.

    Raises PublishedError that lists every missing or damaged component.
    """
    if faults := pipeline_folder_faults(folder):
        raise PublishedError(f"{folder}", faults)
    index = read_json(folder / PIPELINE_INDEX, FileKind.PIPELINE)
    named = [name for name in COMPONENTS if index.get(name) == ["diffusers", class_name]]
    if not named:
        there = {name: index[name][1] for name in COMPONENTS if isinstance(index.get(name), list)}
        shown = ", ".join(f"{name} {kind}" for name, kind in there.items()) or "no backbone"
        fault = f"{index.get('_class_name')} has {shown}, and the run a {class_name}"
        raise PublishedError(f"{folder} is the base of another model", [fault])
    base = PipelineBase(folder, named[0], index)
    parts = {part.name: part for part in components(folder)}
    faults = [f"{name}: {parts[name].fault}" for name in base.others if parts[name].fault]
    if faults:
        raise PublishedError(f"{folder} is no whole pipeline", faults)
    return base


def write_pipeline(
    folder: Path,
    base: PipelineBase,
    published: Published,
    tensors: Mapping[str, Tensor],
    scheduler: Mapping[str, Any],
    card: str,
) -> None:
    """Write a folder that ``DiffusionPipeline.from_pretrained`` loads, atomically.

    ``folder`` must be new or empty. Raises PublishedError, and writes nothing, if the backbone's
    class would reject the tensors.
    """
    import diffusers

    require_loadable(published, tensors)
    index = {name: value for name, value in base.index.items() if name != "_name_or_path"}
    index["_diffusers_version"] = diffusers.__version__
    index[SCHEDULER] = ["diffusers", scheduler["_class_name"]]
    with replacing_folder(folder) as beside:
        write_component(beside / base.backbone, published, tensors)
        write_scheduler(beside, scheduler)
        for name in base.others:
            take_over(base.folder / name, beside / name)
        write_json(beside / PIPELINE_INDEX, index)
        (beside / CARD).write_text(card, encoding="utf-8")


def take_over(source: Path, target: Path) -> None:
    """Copy the files of a component; large ones become hard links."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file():  # links of huggingface_hub's cache lead to files
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(path.resolve(), place)


def _link(path: Path, place: Path) -> None:
    if path.stat().st_size >= _LINKED_BYTES:
        try:
            os.link(path, place)
            return
        except OSError:
            pass  # another file system, or one without links
    shutil.copyfile(path, place)
