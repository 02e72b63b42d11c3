"""Recipes to begin with, of the folder ``examples``."""

from __future__ import annotations

import tomllib
from pathlib import Path

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


def example_names() -> list[str]:
    """Names of the recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def example_text(name: str) -> str:
    """Commented TOML text of a recipe."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def example_backbone(name: str) -> str | None:
    """Backbone that a recipe trains; None for modules."""
    return _BACKBONES.get(name) or tomllib.loads(example_text(name))["model"].get("backbone")


def example_class(name: str) -> str | None:
    """Traced class whose frozen weights a recipe may quantise, if it suggests that."""
    return _CLASSES.get(name)


def example_summary(name: str) -> str:
    """First comment of a recipe."""
    return example_text(name).partition("\n")[0].removeprefix("# ")
