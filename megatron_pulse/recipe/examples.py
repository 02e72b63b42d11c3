"""Recipes to begin with, of the folder ``examples``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from model_specs.derived.names import is_cascade

_FOLDER = Path(__file__).with_name("examples")
_BACKBONES = {
    "controlnet": "controlnet-sd-v1.5",
    "flux": "flux-dev",
    "flux-lora": "flux-dev",
    "hunyuan-dit": "hunyuan-dit-v1.2",
    "pixart": "pixart-sigma",
    "sd15": "sd-v1.5",
    "sd3": "sd3.5-medium",
    "sdxl": "sdxl",
    "sdxl-lora": "sdxl",
    "suv": "suv-8.5b",
}
"""Backbones of recipes that name published weights."""
_CLASSES = {"flux-lora": "diffusers:FluxTransformer2DModel"}
"""Traced classes of recipes that may quantise their frozen weights, in the size of the weights."""
_WAN = "diffusers:WanTransformer3DModel"
_TRACED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "hunyuanvideo-lora": (
        "diffusers:HunyuanVideoTransformer3DModel", {"frames": 33, "height": 90, "width": 160}
    ),
    "svd": (
        "diffusers:UNetSpatioTemporalConditionModel",
        {"num_frames": 14, "num_attention_heads": "5,10,20,20"},
    ),
    "wan21-14b-lora": (_WAN, {}),
    "wan22-5b": (
        _WAN,
        {
            "num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48,
            "out_channels": 48,
        },
    ),
}  # fmt: skip
"""Traced classes of recipes of videos, with the sizes of the published weights."""


def example_names() -> list[str]:
    """Names of the recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def example_text(name: str) -> str:
    """Commented TOML text of a recipe."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def example_backbone(name: str) -> str | None:
    """Backbone that a recipe trains; None for modules, and for the chains of a cascade."""
    named = tomllib.loads(example_text(name))["model"].get("backbone")
    return _BACKBONES.get(name) or (None if is_cascade(named or "") else named)


def example_traced(name: str) -> tuple[str, Mapping[str, object]] | None:
    """Traced class that a recipe trains, and its options in the size of the published weights."""
    return _TRACED.get(name)


def example_class(name: str) -> str | None:
    """Traced class whose frozen weights a recipe may quantise, if it suggests that."""
    return _CLASSES.get(name)


def example_summary(name: str) -> str:
    """First comment of a recipe."""
    return example_text(name).partition("\n")[0].removeprefix("# ")
