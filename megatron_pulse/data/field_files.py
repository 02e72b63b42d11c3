"""Tensors beside samples: a backbone's fields that nothing here makes, for ``write-latents``.

The tensors of ``films/a/b.mp4`` are those of ``films.fields/a/b.safetensors``, by the names of the
backbone's fields: ``control_hidden_states`` of VACE, ``class_labels`` of a UNet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.data.dataset import (
    DataError,
    Derived,
    DiffusionDataset,
    FieldSpec,
    Variation,
)
from megatron_pulse.data.images.conditioning import others_of
from megatron_pulse.data.images.listing import some
from megatron_pulse.data.split_groups import content_hash, name_hash
from megatron_pulse.diffusion.published import StoredTensors
from megatron_pulse.errors import first_of

FIELDS = "fields"
"""Suffix of the folder of tensors."""


class FieldFiles(Derived):
    """``source``, of files below ``root``, with the fields in files of the folder beside it.

    ``read`` are the fields that the backbone reads, ``made`` those that the encoders make. Every
    file must have the same names. Raises DataError with all faults.
    """

    def __init__(
        self,
        source: DiffusionDataset,
        root: Path,
        read: Mapping[str, FieldSpec],
        made: Collection[str],
    ) -> None:
        super().__init__(source)
        folder = others_of(root, FIELDS)
        paths = [path for path in source.pictures() if isinstance(path, Path)]
        places = [path.absolute().relative_to(root.absolute()) for path in paths]
        files = [(folder / place).with_suffix(".safetensors") for place in places]
        faults = [] if paths else [f"tensors belong to files in folders, not to those of {root}"]
        if missing := [file for file in files if not file.is_file()]:
            faults.append(f"{some(folder, missing, 'file')} do not exist")
        if twice := [file for file, count in Counter(files).items() if count > 1]:
            faults.append(f"{some(folder, twice, 'file')} belong to several samples")
        names, others = frozenset[str](), dict[str, list[str]]()
        first = True
        for file in (file for file in files if not missing):
            try:
                stored = StoredTensors([file])
            except PublishedError as error:
                faults += error.faults
                continue
            if first:
                names, first = frozenset(stored), False
            if not stored:
                others.setdefault("there are no tensors", []).append(file.name)
            for name in sorted(names | stored.keys()):
                if fault := _fault(name, names, stored, read, made):
                    others.setdefault(fault, []).append(file.name)
        faults += [f"{of[0]} and {len(of) - 1} others: {told}" for told, of in others.items()]
        if faults:
            needed = ", ".join(sorted(read.keys() - {*made}))
            remedy = (
                f"Write NAME.safetensors for each sample, each with the same of {needed}."
                if needed
                else f"The backbone needs no such tensors: rename or remove {folder.name}."
            )
            raise DataError(f"fields {folder}", first_of(faults), remedy)
        self._files = files
        self._own = {name: read[name] for name in names}
        self.fields = {**source.fields, **self._own}

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        stored = StoredTensors([self._files[index]])
        own = {name: stored[name].to(spec.torch_dtype) for name, spec in self._own.items()}
        return {**super().conditioning(index, variation), **own}

    def identity(self, index: int) -> int:
        own = content_hash(self._files[index])
        return name_hash(f"{super().identity(index)} {own}")


def _fault(
    name: str,
    names: Collection[str],
    stored: StoredTensors,
    read: Mapping[str, FieldSpec],
    made: Collection[str],
) -> str:
    """Reason why a tensor cannot be the field of this name; empty if it can."""
    if name not in stored:
        return f"{name} is missing, which another file has"
    if name in made:
        return f"{name} is made by the encoders: leave it out"
    if name not in read:
        return f"the backbone reads no {name}"
    if name not in names:
        return f"{name} is in this file, another has none"
    shape, dtype = stored.kind_of(name)
    if dtype.is_complex or dtype.is_floating_point and not read[name].torch_dtype.is_floating_point:
        return f"{name} is {str(dtype).removeprefix('torch.')}, the backbone reads {read[name]}"
    if shape != read[name].shape:
        return f"{name} is {'x'.join(map(str, shape))}, the backbone reads {read[name]}"
    return ""
