"""Recipes to begin with, of the folder ``examples``."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("examples")


def example_names() -> list[str]:
    """Names of the recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def example_text(name: str) -> str:
    """Commented TOML text of a recipe."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def example_summary(name: str) -> str:
    """First comment of a recipe."""
    return example_text(name).partition("\n")[0].removeprefix("# ")
