"""Adapter files: of diffusers, peft and kohya.

diffusers' file names each factor ``unet.LAYER.lora_A.weight`` (or ``transformer.``), with the rank
and alpha in its header. ComfyUI reads it too. peft's folder has the same factors, and a
configuration beside them. kohya's names are those of sd-scripts, with one alpha a layer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_pulse.adapters.adapter import Adapter, kohya_name
from megatron_pulse.adapters.low_rank import A, B, M
from megatron_pulse.errors import UserError, format_faults, unmatched_patterns
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json, replacing, replacing_folder

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_METADATA = "lora_adapter_metadata"
"""Key of the configuration in a diffusers file's header."""
_PEFT = "base_model.model."
_PREFIXES = (_PEFT, "unet.", "transformer.", "diffusion_model.")
_KOHYA = {A: "lora_down.weight", B: "lora_up.weight", M: "dora_scale"}
_MAGNITUDE = M.removesuffix(".weight")
"""Name of magnitudes in the files of peft and diffusers."""
_OLD = {
    "lora.down.weight": A,
    "lora.up.weight": B,
    **{name: part for part, name in _KOHYA.items()},
    _MAGNITUDE: M,
}
"""Names of the factors in files of other programs."""


def is_unet(class_name: str) -> bool:
    """True if pipelines call a model of this class ``unet``, otherwise ``transformer``."""
    return class_name.startswith("UNet")


def write_adapter(
    place: Path,
    kind: str,
    adapter: Adapter,
    factors: Mapping[str, Tensor],
    class_name: str,
    card: str = "",
) -> None:
    """Write ``factors`` (``LAYER.lora_A.weight``) of a model of ``class_name`` in format ``kind``.

    ``place`` is a file (.safetensors), or a folder that also gets the ``card``. Raises UserError if
    the format has no names for the model.
    """
    config = _config(adapter, factors)
    if kind == "diffusers":
        config["lora_dropout"] = 0.0  # diffusers applies it in sampling too
    component = "unet" if is_unet(class_name) else "transformer"
    header = {"format": "pt"}
    if kind == "peft":
        tensors = {_PEFT + _in_file(name): tensor for name, tensor in factors.items()}
    elif kind == "kohya":
        if component != "unet":
            raise UserError(
                f"kohya's names are for UNets, and this is a {class_name}; ComfyUI reads the "
                "format 'diffusers'"
            )
        tensors = _to_kohya(adapter, factors)
    else:
        tensors = {f"{component}.{_in_file(name)}": tensor for name, tensor in factors.items()}
        named = {f"{component}.{key}": value for key, value in config.items()}
        header[_METADATA] = json.dumps(named, indent=2, sort_keys=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if place.suffix == ".safetensors":
        with replacing(place) as beside:
            save_file(tensors, beside, header)
        return
    with replacing_folder(place) as beside:
        save_file(tensors, beside / (PEFT_FILE if kind == "peft" else DIFFUSERS_FILE), header)
        if kind == "peft":
            (beside / PEFT_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if card:
            (beside / "README.md").write_text(card, encoding="utf-8")


def _config(adapter: Adapter, factors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Settings of peft's ``LoraConfig``; targets are the whole names of layers."""
    layers = sorted(name.removesuffix(f".{A}") for name in factors if name.endswith(A))
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": alpha,
        "target_modules": layers,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "use_dora": adapter.type == "dora",
    }


def _is_magnitude(name: str) -> bool:
    return name.endswith(f".{M}")


def _in_file(name: str) -> str:
    """Name of a factor in peft's files, and in those of diffusers."""
    return name.removesuffix(".weight") if _is_magnitude(name) else name


def _to_kohya(adapter: Adapter, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        part = next(part for part in _KOHYA if name.endswith(f".{part}"))
        layer = kohya_name(name.removesuffix(f".{part}"))
        if part == M:  # a column
            tensor = tensor.view(-1, *(1 for _ in factors[_beside(name, B)].shape[1:]))
        tensors[f"{layer}.{_KOHYA[part]}"] = tensor
        tensors[f"{layer}.alpha"] = torch.tensor(float(adapter.alpha))
    return tensors


@dataclass(frozen=True)
class AdapterFile:
    """Adapter in files: rank, alpha, factors (``LAYER.lora_A.weight``), and dropout in training."""

    path: Path
    rank: int
    alpha: float
    factors: Mapping[str, Tensor]
    dropout: float = 0.0

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, dots in kohya's names being underscores."""
        return tuple(sorted(name.removesuffix(f".{A}") for name in self.factors if A in name))

    @property
    def type(self) -> str:
        """Type of the adapter."""
        return "dora" if any(name.endswith(M) for name in self.factors) else "lora"

    def named_as(self, layers: Collection[str]) -> AdapterFile:
        """The same with names of ``layers`` of a model in place of kohya's.

        Raises UserError for layers that the model lacks.
        """
        known = {layer: layer for layer in layers}
        known |= {kohya_name(layer): layer for layer in layers}
        if lacking := [layer for layer in self.layers if layer not in known]:
            faults = unmatched_patterns(lacking, list(layers), "layer that takes an adapter")
            raise UserError(format_faults(f"{self.path} is of another model", faults))
        factors = {
            f"{known[name.removesuffix(f'.{part}')]}.{part}": tensor
            for name, tensor in self.factors.items()
            for part in (A, B, M)
            if name.endswith(f".{part}")
        }
        return replace(self, factors=factors)


def read_adapter(path: Path) -> AdapterFile:
    """Read an adapter's file or folder, in the format of diffusers, peft or kohya.

    Unchanged files are read once. Raises UserError, with every fault, for files that hold no LoRA
    or DoRA of one rank and alpha.
    """
    file = _file_of(path)
    found = [each.stat() for each in (file, file.with_name(PEFT_CONFIG)) if each.is_file()]
    return _read(path, file.absolute(), tuple((s.st_mtime_ns, s.st_size) for s in found))


@functools.lru_cache(maxsize=1)
def _read(path: Path, file: Path, state: tuple[tuple[int, int], ...]) -> AdapterFile:
    """See ``read_adapter``; ``state`` has the times and sizes of the files."""
    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has kinds of its own
        raise UserError(
            f"{file} cannot be read as a .safetensors file: {error}. Name an adapter of diffusers, "
            "peft or kohya"
        ) from error
    factors, alphas, faults = _factors(stored)
    config = _read_config(file, header)
    for name in ("use_rslora", "rank_pattern", "alpha_pattern"):
        if config.get(name):
            faults.append(f"its setting {name} is unsupported")
    parts = (A, B, M) if config.get("use_dora") or any(map(_is_magnitude, factors)) else (A, B)
    pairs = {name.removesuffix(f".{part}") for name in factors for part in parts
             if name.endswith(f".{part}")}  # fmt: skip
    faults += [
        f"{layer}.{part} is missing" for layer in sorted(pairs) for part in parts
        if f"{layer}.{part}" not in factors
    ]  # fmt: skip
    ranks = {tensor.shape[0] for name, tensor in factors.items() if name.endswith(A)}
    if not factors:
        what = f"{len(stored)} tensor(s), such as {next(iter(stored))}" if stored else "nothing"
        faults = [f"it holds {what}; LoRA has names with lora_A and lora_B, or lora_down, lora_up"]
    if len(ranks) > 1:
        faults.append(f"its layers are of ranks {', '.join(map(str, sorted(ranks)))}, not of one")
    if len(alphas) > 1:
        faults.append(f"its layers have alphas {', '.join(map(str, sorted(alphas)))}, not one")
    if faults:
        raise UserError(format_faults(f"{file} holds no adapter that can be trained", faults))
    (rank,) = ranks
    alpha = config.get("lora_alpha", next(iter(alphas), rank))
    return AdapterFile(path, rank, float(alpha), factors, float(config.get("lora_dropout") or 0.0))


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder; name an exported adapter")
        return path
    for name in (DIFFUSERS_FILE, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"{path} has neither {DIFFUSERS_FILE} nor {PEFT_FILE}: name an exported adapter"
    )


def _factors(
    stored: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], set[float], list[str]]:
    """Factors without a component's prefix, the alphas of layers, and names of other tensors."""
    factors: dict[str, Tensor] = {}
    alphas: set[float] = set()
    faults = []
    for name, tensor in stored.items():
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        for old, new in _OLD.items():
            if plain.endswith(f".{old}"):
                plain = plain.removesuffix(old) + new
        if plain.endswith((f".{A}", f".{B}", f".{M}")):
            factors[plain] = tensor
        elif plain.endswith(".alpha"):
            alphas.add(float(tensor))
        else:
            faults.append(f"{name} is neither a factor nor an alpha")
    for name in filter(_is_magnitude, factors):
        factor = factors.get(_beside(name, B))
        is_wide = factor is not None and factor.dim() > 2
        factors[name] = factors[name].view(1, -1, 1, 1) if is_wide else factors[name].flatten()
    return factors, alphas, faults


def _beside(magnitude: str, part: str) -> str:
    """Name of a factor of the layer with this ``magnitude``."""
    return magnitude.removesuffix(M) + part


def _read_config(file: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Settings of ``LoraConfig``: beside a peft file, or in a diffusers file's header."""
    beside = file.with_name(PEFT_CONFIG)
    if file.name == PEFT_FILE and beside.is_file():
        return read_json(beside, FileKind.ADAPTER)
    try:
        found = json.loads(header.get(_METADATA, "{}"))
    except ValueError:
        found = {}
    return {str(key).rpartition(".")[2]: value for key, value in dict(found).items()}
