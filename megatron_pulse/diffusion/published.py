"""Weights as others store them: diffusers folders (safetensors), and state dicts in one file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from megatron_pulse.backbone.published import Published, PublishedError
from megatron_pulse.diffusion.files import replacing

_STEM = "diffusion_pytorch_model"
_COMPONENTS = ("unet", "transformer")
_SHARD_BYTES = 10_000_000_000


def find_component(folder: Path) -> Path:
    """The folder of the backbone: ``folder``, or that component of a pipeline's folder.

    Raises PublishedError where there is no ``config.json``.
    """
    for place in (folder, *(folder / name for name in _COMPONENTS)):
        if (place / "config.json").is_file():
            return place
    looked = ", ".join([".", *_COMPONENTS])
    raise PublishedError(
        f"{folder} is not a diffusers folder", [f"there is no config.json in {looked}"]
    )


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``; raises PublishedError if it is not readable as such."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PublishedError(f"{folder / 'config.json'}", [str(error)]) from error
    if not isinstance(config, dict) or "_class_name" not in config:
        raise PublishedError(f"{folder / 'config.json'}", ["it names no class (_class_name)"])
    return config


def read_objective(component: Path) -> str | None:
    """What the pipeline's scheduler says that the backbone predicts; None if there is none."""
    path = component.parent / "scheduler" / "scheduler_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if "FlowMatch" in str(config.get("_class_name")):
        return "flow"
    kinds = {"epsilon": "epsilon", "v_prediction": "v"}
    return kinds.get(str(config.get("prediction_type", "epsilon")))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a diffusers component, sharded or not.

    Raises PublishedError that lists every file that is missing or damaged.
    """
    index = folder / f"{_STEM}.safetensors.index.json"
    names = [f"{_STEM}.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise PublishedError(f"{index}", [f"not an index: {error}"]) from error
    elif not (folder / names[0]).is_file():
        found = sorted(path.name for path in folder.glob(f"{_STEM}*"))
        raise PublishedError(
            f"{folder} holds no weights in safetensors",
            [f"{names[0]} is missing (there is: {', '.join(found) or 'nothing like it'})"],
        )
    tensors: dict[str, Tensor] = {}
    faults = []
    for name in tqdm(names, desc="reading", unit="file", delay=2):
        try:
            with safe_open(folder / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    tensors[key] = file.get_tensor(key)
        except Exception as error:  # safetensors has its own kinds
            faults.append(f"{name}: {error}")
    if faults:
        raise PublishedError(f"{folder}", faults)
    return tensors


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of one ``.safetensors`` file, or of a state dict that torch.save wrote."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise many kinds for a damaged file
        raise PublishedError(f"{path}", [str(error).splitlines()[0]]) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise PublishedError(f"{path}", ["it holds no state dict (names and tensors)"])
    return state


def write_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file, whole or not at all: safetensors, or torch.save for any other suffix."""
    with replacing(path) as beside:
        if path.suffix == ".safetensors":
            save_file(_own(tensors), beside, {"format": "pt"})
        else:
            torch.save(_own(tensors), beside)


def write_folder(
    folder: Path,
    published: Published,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """A folder that ``from_pretrained`` of ``published.class_name`` loads; appears whole.

    ``folder`` must not exist, or be empty.
    """
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
    with _appearing(folder) as beside:
        (beside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        files = plan.filename_to_tensors.items()
        for name, keys in tqdm(files, desc="writing", unit="file", delay=2):
            save_file(_own({key: tensors[key] for key in keys}), beside / name, {"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (beside / f"{_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each in contiguous memory that no other shares, as safetensors wants."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen
        result[name] = tensor.clone() if shared else tensor
        seen.add(result[name].data_ptr())
    return result


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place if the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    beside.mkdir()
    try:
        yield beside
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
