"""Reading and writing of published weights.

Formats are component folders of diffusers and transformers, and state dicts in one file. All
readers of such weights use this module.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_pulse.backbone.published_weights import Published, PublishedError
from megatron_pulse.backbone.torch_archive_checks import is_plain_archive
from megatron_pulse.diffusion.scheduler_import import SCHEDULER_FILE, file_beside
from megatron_pulse.diffusion.single_file_refusal import original_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, replacing, replacing_folder
from megatron_pulse.paths import is_file_name, no_file
from megatron_pulse.progress import track

_STEM = "diffusion_pytorch_model"
_SAFE, _TORCH = ".safetensors", ".bin"
STEMS: Mapping[str, Mapping[str, str]] = {
    "diffusers": {_SAFE: _STEM, _TORCH: _STEM},
    "transformers": {_SAFE: "model", _TORCH: "pytorch_model"},
}
"""Stems of weight files by library and suffix, in order of precedence."""
COMPONENTS = ("unet", "transformer")
"""Folders of the backbone in a pipeline's folder."""
CARD = "README.md"
"""Model card."""
_MAX_HEAD = 16 << 20
"""Largest header of a safetensors file in bytes; a tensor takes about 100."""
_SHARD_BYTES = 10_000_000_000
_PICKLES = (_TORCH, ".pt", ".pth", ".ckpt")
_WORDS = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+){2,}")
_MAX_WORDS = 64 << 20
"""Bytes of a pickle that are searched for names."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch dtypes by safetensors' names."""


def find_component(folder: Path) -> Path:
    """Folder of the backbone: ``folder`` itself, or the component of a pipeline's folder.

    Raises PublishedError if there is no ``config.json``.
    """
    for place in (folder, *(folder / name for name in COMPONENTS)):
        if (place / "config.json").is_file():
            return place
    looked = ", ".join([".", *COMPONENTS])
    fault = f"there is no config.json in {looked}"
    if os.path.lexists(folder / "config.json"):
        fault = no_file(folder / "config.json")
    raise PublishedError(f"{folder} is not a diffusers folder", [fault, *original_files(folder)])


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; raises PublishedError if the file is unreadable or names no class."""
    try:
        config = read_json(folder / "config.json", FileKind.MODEL)
    except FileError as error:
        raise _unread(folder / "config.json", error) from error
    if not isinstance(config.get("_class_name"), str):
        raise PublishedError(f"{folder / 'config.json'}", ["_class_name is missing"])
    return config


def _require_short_head(path: Path) -> None:
    """Raise ValueError if the header of a safetensors file is larger than any model needs."""
    with open(path, "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
    if num_bytes > _MAX_HEAD:
        raise ValueError(
            f"its head has {num_bytes:,} bytes; at most {_MAX_HEAD:,} are read: not a safetensors "
            "file of a model"
        )


def _unread(path: Path, error: FileError) -> PublishedError:
    """PublishedError of an unreadable file, naming the file once."""
    return PublishedError(
        f"{path}", [str(error).removeprefix(f"{path} ").removeprefix(f"{path}: ")]
    )


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of files; each is memory-mapped and read on access.

    Files are safetensors, or state dicts that torch.save wrote (weights only: no code runs). Raises
    PublishedError that lists every missing or damaged file of ``paths``, and every name that occurs
    in several.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._loaded: dict[str, Tensor] = {}
        faults = []
        for path in paths:
            if fault := no_file(path):
                faults.append(fault)
                continue
            try:
                kinds = self._looked_at(path)
            except Exception as error:  # safetensors and torch have their own kinds
                faults.append(f"{path.name}: {error}")
                continue
            for name in kinds:
                if name in self._files:
                    faults.append(f"{name} is in {self._files[name].name} and in {path.name}")
                self._files[name] = path
            self._kinds.update(kinds)
        if faults:
            raise PublishedError(str(paths[0].parent), faults)

    def _looked_at(self, path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of one file."""
        if path.suffix != _SAFE:
            state = _load_state_dict(path)
            self._loaded.update(state)
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        _require_short_head(path)
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (tuple(part.get_shape()), _dtype_of(part.get_dtype()))
                for name, part in slices.items()
            }

    def __getitem__(self, name: str) -> Tensor:
        if name in self._loaded:
            return self._loaded[name]
        with safe_open(self._files[name], "pt") as file:  # pages are freed with the tensor
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, from the header alone."""
        return self._kinds[name]

    def unlike(self, places: Mapping[str, object]) -> list[str]:
        """Differences between the files and an index that maps each name to a file in
        ``places``."""
        found = {name: path.name for name, path in self._files.items()}
        return [
            f"{name} is in {found.get(name, 'no file')}, but the index says "
            f"{places.get(name, 'nothing of it')}"
            for name in sorted({*found, *places})
            if found.get(name) != places.get(name)
        ]


def read_folder(
    folder: Path,
    variant: str | None = None,
    library: str = "diffusers",
    *,
    any_layout: bool = False,
) -> StoredTensors:
    """All tensors of a component of ``library``, sharded or not.

    Safetensors files take precedence over torch.save files (``.bin``). ``variant`` is the part of
    file names for another precision ("fp16"). Without a ``variant``, files without that part are
    read, or those of the only variant.

    Raises PublishedError that lists every missing or damaged file, every file outside of the
    folder, and every name that contradicts the index. Also raises PublishedError for weights of
    an original layout, unless ``any_layout``.
    """
    path = _find_weights(folder, variant, library)
    if path.suffix != ".json":
        tensors = StoredTensors([path])
    else:
        places = read_index(path)
        tensors = StoredTensors([folder / name for name in sorted(set(places.values()))])
        if unlike := tensors.unlike(places):
            raise PublishedError(f"{path}", unlike)
    if not any_layout and (faults := original_faults(path, tensors)):
        raise PublishedError(f"{path}", faults)
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """File name of each tensor, from the index of a sharded component.

    Raises PublishedError for an invalid index, or for names that are no files of its folder.
    """
    try:
        places = read_json(path, FileKind.INDEX).get("weight_map")
    except FileError as error:
        raise _unread(path, error) from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        fault = "weight_map must be an object with the file of each tensor"
        raise PublishedError(f"{path}", [fault])
    names = sorted(set(places.values()))
    outside = [name for name in names if not is_file_name(name)]
    if outside:
        raise PublishedError(
            f"{path}",
            [f"{repr(name)[:80]} is not a file name in {path.parent}" for name in outside],
        )
    return places


def holds_weights(folder: Path) -> bool:
    """True if a diffusers component has weights in any format beside its configuration."""
    return any(path.name.startswith(_STEM) or path.suffix in _PICKLES for path in folder.iterdir())


def _find_weights(folder: Path, variant: str | None, library: str) -> Path:
    """File with all tensors, or index of several files."""
    found: dict[str | None, Path] = {}
    for suffix, stem in STEMS[library].items():
        own: dict[str | None, Path] = {}
        names = [f"*{suffix[1:]}", f"*{suffix[1:]}.index*json"]
        # The last found counts: diffusers prefers an index, transformers a whole file.
        for name in reversed(names) if library == "transformers" else names:
            for path in folder.glob(f"{stem}.{name}"):
                middle = path.name.removeprefix(f"{stem}.").replace(suffix[1:], "")
                middle = middle.removesuffix("json").replace("index", "").strip(".")
                if path.is_file() and "-of-" not in middle:
                    own[middle or None] = path
        found = {**own, **found}
    if variant is None and None not in found and len(found) == 1:
        (variant,) = found
    if variant in found:
        return found[variant]
    if found:
        known = ", ".join(str(each or "none") for each in found)
        wanted = f"variant {variant!r}" if variant else "weights without a variant"
        fault = f"no {wanted}; it has variants {known}: name one"
        raise PublishedError(f"{folder} holds no such weights", [fault])
    stems = STEMS[library].items()
    named = [path for end, stem in stems for path in sorted(folder.glob(f"{stem}{end}*"))]
    if amiss := [fault for path in named if (fault := no_file(path))]:
        raise PublishedError(f"{folder} holds no readable weights", amiss)
    there = sorted(p.name for p in folder.glob("*") if p.suffix in (_SAFE, *_PICKLES))
    fault = ", and ".join(f"{stem}{end} is missing" for end, stem in stems)
    fault += f" (found: {', '.join(there) or 'no similar file'})"
    raise PublishedError(f"{folder} holds no such weights", [fault, *original_files(folder)])


def _dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"it holds tensors of {name}, a type unknown to torch")
    return _DTYPES[name]


def read_state_dict(path: Path) -> StoredTensors:
    """Tensors of one ``.safetensors`` file, or of a state dict that torch.save wrote."""
    return StoredTensors([path])


def _load_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a torch.save file; raises ValueError if the content is no state dict."""
    try:
        mapped = is_plain_archive(path)  # false for files written before torch 1.6
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "it is not a state dict of torch.save, or holds more than tensors, which is never "
            "unpickled: take its .safetensors"
        ) from error
    except EOFError as error:
        raise ValueError("it is empty or truncated") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ValueError(str(error).splitlines()[0]) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # of Lightning, which SD was trained with
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        fault = "it holds no state dict (tensors by name)"
        raise ValueError(f"{fault}{_and(original_faults(path, names_in(path)))}")
    return state


def _and(faults: Sequence[str]) -> str:
    return "".join(f"; {fault}" for fault in faults)


def original_files(folder: Path) -> list[str]:
    """Faults for the files of a folder that are original single-file checkpoints."""
    if not folder.is_dir():
        return []
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (_SAFE, *_PICKLES)]
    return [fault for path in files for fault in original_faults(path, names_in(path))]


def names_in(path: Path) -> list[str]:
    """Names of the tensors in a file, without running anything in the file.

    For torch.save files these are words of the pickle, which is not unpickled.
    """
    try:
        if path.suffix == _SAFE:
            return list(StoredTensors([path]))
        if not is_plain_archive(path):
            return []
        with zipfile.ZipFile(path) as archive:
            (record,) = (one for one in archive.infolist() if one.filename.endswith("/data.pkl"))
            content = archive.open(record).read(_MAX_WORDS)
    except (PublishedError, OSError, ValueError):  # reading the file reports the error
        return []
    return [found.decode() for found in _WORDS.findall(content)]


def write_state_dict(
    path: Path, tensors: Mapping[str, Tensor], scheduler: Mapping[str, Any] | None = None
) -> None:
    """Write one file atomically: safetensors, or torch.save for any other suffix.

    The configuration of a ``scheduler`` goes into a file beside it; both appear or neither.
    """
    with ExitStack() as files:  # the first entered appears last
        if scheduler is not None:
            write_json(files.enter_context(replacing(file_beside(path))), scheduler)
        beside = files.enter_context(replacing(path))
        if path.suffix == ".safetensors":
            save_file(_own(tensors), beside, {"format": "pt"})
        else:
            torch.save(_own(tensors), beside)


def write_folder(
    folder: Path,
    published: Published,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = _SHARD_BYTES,
    scheduler: Mapping[str, Any] | None = None,
    card: str = "",
) -> None:
    """Write a folder that ``from_pretrained`` of ``published.class_name`` loads, atomically.

    ``folder`` must be new or empty. The configuration of a ``scheduler`` goes into the subfolder
    ``scheduler``, a model ``card`` into README.md. Raises PublishedError, and writes nothing, if
    the class would reject the tensors.
    """
    require_loadable(published, tensors)
    with replacing_folder(folder) as beside:
        write_component(beside, published, tensors, shard_bytes)
        if scheduler is not None:
            write_scheduler(beside, scheduler)
        if card:
            (beside / CARD).write_text(card, encoding="utf-8")


def require_loadable(published: Published, tensors: Mapping[str, Tensor]) -> None:
    """Raise PublishedError if the class in diffusers would reject the tensors."""
    if faults := list(_unreadable(published, tensors)):
        raise PublishedError(f"diffusers' {published.class_name} cannot read this", faults)


def write_component(
    folder: Path,
    published: Published,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write configuration and weights into ``folder``, which is made if missing."""
    import diffusers
    from huggingface_hub import split_torch_state_dict_into_shards

    config = {
        "_class_name": published.class_name,
        "_diffusers_version": diffusers.__version__,
        **published.config,
    }
    pattern = f"{_STEM}{{suffix}}.safetensors"
    plan = split_torch_state_dict_into_shards(
        _own(tensors), filename_pattern=pattern, max_shard_size=shard_bytes
    )
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    files = plan.filename_to_tensors.items()
    for name, keys in track(files, "writing", "files"):
        save_file(_own({key: tensors[key] for key in keys}), folder / name, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / f"{_STEM}.safetensors.index.json", index)


def write_scheduler(folder: Path, scheduler: Mapping[str, Any]) -> None:
    """Write a scheduler's configuration into the subfolder ``scheduler``."""
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / SCHEDULER_FILE, scheduler)


def write_json(path: Path, config: Mapping[str, Any]) -> None:
    """Write an object as diffusers does."""
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _unreadable(published: Published, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Differences between ``tensors`` and the class, built from the configuration."""
    import diffusers

    try:
        with torch.device("meta"):
            model = getattr(diffusers, published.class_name).from_config(dict(published.config))
    except Exception as error:  # of many types, for settings that its modules reject
        yield f"its configuration: {error}"
        return
    theirs = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = {name: tensor.shape for name, tensor in tensors.items()}
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            there, here = (list(shapes.get(name, ["nothing"])) for shapes in (theirs, ours))
            yield f"{name} is {there} there and {here} here"


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in contiguous memory without sharing, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen
        result[name] = tensor.clone() if shared else tensor
        seen.add(result[name].data_ptr())
    return result
