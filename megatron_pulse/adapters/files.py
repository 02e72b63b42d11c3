"""Adapter files: of diffusers, peft and kohya.

diffusers' file names each factor ``unet.LAYER.lora_A.weight`` (or ``transformer.``), with the rank
and alpha in its header. ComfyUI reads it too. peft's folder has the same factors, and a
configuration beside them. kohya's names are those of sd-scripts, with one alpha a layer. LoKr is in
files of peft, and in LyCORIS's with kohya's names, where a layer without a product has scale 1.
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

from megatron_pulse.adapters.adapter import NEAREST, Adapter, kohya_name
from megatron_pulse.adapters.kronecker import W1, W2, W2_A, W2_B, factor_of, is_whole, scaled
from megatron_pulse.adapters.low_rank import PRODUCT_PARTS, A, B, M
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
_PARTS = (A, B, M, *PRODUCT_PARTS)
_UNSUPPORTED = (
    *("use_rslora", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout"),
    *("decompose_both", "use_effective_conv2d"),
)
"""Settings of peft that cannot be continued."""


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
    if kind == "diffusers" and adapter.type == "lokr":
        raise UserError("diffusers reads no LoKr: take the format peft, or kohya of a UNet")
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
    layers = _layers(factors)
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    if adapter.type == "lokr":
        return {
            "peft_type": "LOKR",
            "r": adapter.rank,
            "alpha": alpha,
            "target_modules": layers,
            "decompose_factor": adapter.factor,
        }
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": alpha,
        "target_modules": layers,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "use_dora": adapter.type == "dora",
    }


def count_layers(factors: Mapping[str, Tensor]) -> int:
    """Number of layers that have ``factors``."""
    return len(_layers(factors))


def _layers(factors: Mapping[str, Tensor]) -> list[str]:
    return sorted(n.removesuffix(f".{part}") for n in factors for part in (A, W1) if _is(n, part))


def _is(name: str, part: str) -> bool:
    return name.endswith(f".{part}")


def _is_magnitude(name: str) -> bool:
    return _is(name, M)


def _in_file(name: str) -> str:
    """Name of a factor in peft's files, and in those of diffusers."""
    return name.removesuffix(".weight") if _is_magnitude(name) else name


def _to_kohya(adapter: Adapter, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if adapter.type == "lokr":
        whole = scaled(factors, lambda la: adapter.scale if is_whole(factors, la) else 1.0)
        for name, tensor in whole.items():
            layer, _, part = name.rpartition(".")
            alpha = adapter.rank if is_whole(factors, layer) else adapter.alpha
            tensors[f"{kohya_name(layer)}.{part}"] = tensor
            tensors[f"{kohya_name(layer)}.alpha"] = torch.tensor(float(alpha))
        return tensors
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
    """Adapter in files: rank, alpha, factors (``LAYER.lora_A.weight``), and dropout in training.

    ``factor`` is that of LoKr.
    """

    path: Path
    rank: int
    alpha: float
    factors: Mapping[str, Tensor]
    dropout: float = 0.0
    factor: int = NEAREST

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, dots in kohya's names being underscores."""
        return tuple(_layers(self.factors))

    @property
    def type(self) -> str:
        """Type of the adapter."""
        if any(_is(name, W1) for name in self.factors):
            return "lokr"
        return "dora" if any(map(_is_magnitude, self.factors)) else "lora"

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
            for part in _PARTS
            if _is(name, part)
        }
        return replace(self, factors=factors)


def read_adapter(path: Path) -> AdapterFile:
    """Read an adapter's file or folder, in the format of diffusers, peft or kohya.

    Unchanged files are read once. Raises UserError, with every fault, for files that hold no LoRA,
    DoRA or LoKr of one rank and alpha.
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
    faults += [f"its setting {name} is unsupported" for name in _UNSUPPORTED if config.get(name)]
    if any(name.endswith(PRODUCT_PARTS) for name in factors):
        return _products(path, file, factors, alphas, config, faults)
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
        faults = [
            f"it holds {what}; LoRA has names with lora_A and lora_B, or lora_down, lora_up, and "
            "LoKr with lokr_w1"
        ]
    if len(ranks) > 1:
        faults.append(f"its layers are of ranks {', '.join(map(str, sorted(ranks)))}, not of one")
    if len(of_layers := {*alphas.values()}) > 1:
        faults.append(_several(of_layers))
    if faults:
        raise UserError(format_faults(f"{file} holds no adapter that can be trained", faults))
    (rank,) = ranks
    alpha = config.get("lora_alpha", next(iter(of_layers), rank))
    return AdapterFile(path, rank, float(alpha), factors, float(config.get("lora_dropout") or 0.0))


def _several(alphas: set[float]) -> str:
    return f"its layers have alphas {', '.join(map(str, sorted(alphas)))}, not one"


def _products(
    path: Path,
    file: Path,
    factors: dict[str, Tensor],
    alphas: Mapping[str, float],
    config: Mapping[str, Any],
    faults: list[str],
) -> AdapterFile:
    """LoKr adapter with these ``factors``."""
    layers = sorted({name.rpartition(".")[0] for name in factors})
    for layer in layers:
        have = {name.rpartition(".")[2] for name in factors if name.rpartition(".")[0] == layer}
        if have not in ({W1, W2}, {W1, W2_A, W2_B}):
            faults.append(f"{layer} has {', '.join(sorted(have))}; there is {W1} with {W2}, or "
                          f"with {W2_A} and {W2_B}")  # fmt: skip
    ranks = {tensor.shape[0] for name, tensor in factors.items() if _is(name, W2_B)}
    rank = config.get("r") or next(iter(ranks), 0)
    if len(ranks) > 1:
        faults.append(f"its layers are of ranks {', '.join(map(str, sorted(ranks)))}, not of one")
    if not rank:  # any from which no layer has a product
        rank = max(max(t.shape[:2]) for name, t in factors.items() if _is(name, W2))
    factor = None if faults else factor_of(factors, layers, rank)
    if not faults and factor is None:
        faults.append("its Kronecker factors are not those of one factor and rank")
    products = [layer for layer in layers if not is_whole(factors, layer)]
    of_products = {alphas[layer] for layer in products if layer in alphas}
    if len(of_products) > 1:
        faults.append(_several(of_products))
    alpha = float(config.get("alpha") or next(iter(of_products), rank))
    if faults or factor is None:
        raise UserError(format_faults(f"{file} holds no adapter that can be trained", faults))
    if not config:  # LyCORIS
        factors = scaled(factors, lambda la: 1.0 if la in products else rank / alpha)
    return AdapterFile(path, rank, alpha, factors, 0.0, factor)


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
) -> tuple[dict[str, Tensor], dict[str, float], list[str]]:
    """Factors without a component's prefix, the alphas of layers, and names of other tensors."""
    factors: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    faults = []
    for name, tensor in stored.items():
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        for old, new in _OLD.items():
            if plain.endswith(f".{old}"):
                plain = plain.removesuffix(old) + new
        if any(_is(plain, part) for part in _PARTS):
            factors[plain] = tensor
        elif plain.endswith(".alpha"):
            alphas[plain.removesuffix(".alpha")] = float(tensor)
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
