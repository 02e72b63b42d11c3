"""Recipe files: reading with all faults at once, overrides, and writing.

recipe = read_recipe(Path("recipe.toml"), ["optimizer.lr=2e-5", "training.steps=100"])
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_pulse.errors import UserError, faults_in, format_faults
from megatron_pulse.files import replacing
from megatron_pulse.json_validation import validated
from megatron_pulse.recipe.keys import TABLES, Recipe

LARGEST_BYTES = 1_000_000


@dataclass(frozen=True)
class RecipeFile:
    """A recipe, and the tables it was read from."""

    recipe: Recipe
    tables: Mapping[str, Any]


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> RecipeFile:
    """Read a recipe; each override is TABLE.KEY=VALUE, its value in TOML or a bare text.

    Raises UserError with every fault of the file and of the overrides.
    """
    tables = _parse(path)
    faults = list(_override(tables, overrides))
    if isinstance(data := tables.get("data"), dict) and not data.keys() & {"source", "sources"}:
        faults.append("data.source is missing: give it, or [[data.sources]]")
    _wrap_single_texts(tables)
    try:
        recipe = validated(Recipe, tables)
    except ValueError as error:
        faults += [_with_nearest_table(fault) for fault in faults_in(error)]
    else:
        faults += check_combinations(recipe)
    if faults:
        raise UserError(format_faults(str(path), faults))
    return RecipeFile(recipe, tables)


def _parse(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a recipe, a .toml file")
    if not path.exists():
        raise UserError(
            f"{path}: there is no such recipe; 'pulse recipe NAME > {path}' writes one to begin "
            "with ('pulse recipe' lists them)"
        )
    if (size := path.stat().st_size) > LARGEST_BYTES:
        raise UserError(f"{path} has {size:,} bytes; a recipe has at most {LARGEST_BYTES:,}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML: {error}") from error


def _override(tables: dict[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Replace each TABLE.KEY=VALUE in ``tables``; yield the faults of overrides."""
    count_of = Counter(text.partition("=")[0].strip() for text in overrides if "=" in text)
    for name, count in count_of.items():
        if count > 1:
            yield f"{name} is given {count} times: give it once, and quote a pattern with braces"
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            yield f"{text}: write it as TABLE.KEY=VALUE, e.g. optimizer.lr=1e-4"
            continue
        *parents, last = name.strip().split(".")
        place: Any = tables
        for part in parents:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            yield f"{text}: {'.'.join(parents)} is no table"
            continue
        place[last] = _value(value)


def _value(text: str) -> Any:
    """TOML value of ``text``; a text that is none stands for itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _with_nearest_table(fault: str) -> str:
    """``fault`` with the tables that have its unknown key, for a key in the wrong table."""
    # TOML has no null: a key is left out. Its objects are tables.
    fault = fault.replace(", or null", "").replace(" an object", " a table")
    name, unknown, _ = fault.partition(" is unknown;")
    if not unknown:
        return fault
    last = name.rpartition(".")[2]
    homes = [f"{t}.{last}" for t, kind in TABLES.items() if last in {f.name for f in fields(kind)}]
    return f"{name} is unknown; did you mean {' or '.join(homes)}?" if homes else fault


def _wrap_single_texts(tables: dict[str, Any]) -> None:
    """Make a text the only item of a key that takes a list of texts."""
    for name, kind in TABLES.items():
        table = tables.get(name)
        if isinstance(table, dict):
            for each in fields(kind):
                if each.default == () and isinstance(table.get(each.name), str):
                    table[each.name] = [table[each.name]]


def check_combinations(recipe: Recipe) -> list[str]:
    """Faults of keys beside each other, as far as no flag is made of them."""
    model, faults = recipe.model, []
    if not (model.weights or model.backbone or model.module or recipe.parallel.plan):
        faults.append("[model] names nothing to train: give weights, backbone or module")
    data = recipe.data
    if data.source and data.sources:
        faults.append("data.source and [[data.sources]] exclude each other: give one of them")
    if data.caption_prefix and any(source.caption_prefix for source in data.sources):
        faults.append("data.caption_prefix excludes those of [[data.sources]]: give one of them")
    for name in ("controlnet", "null_class"):
        if getattr(model, name) and not model.weights:
            faults.append(f"model.{name} is for weights of a diffusers folder: give model.weights")
    return faults


def to_toml(tables: Mapping[str, Any], heading: str = "") -> str:
    """TOML text of a recipe's tables, under comment lines of ``heading``."""
    import tomli_w

    lines = [f"# {line}".rstrip() + "\n" for line in heading.splitlines()]
    return "".join(lines) + tomli_w.dumps(tables)


def write_recipe(path: Path, tables: Mapping[str, Any], heading: str) -> None:
    """Write a recipe's tables, replacing the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(to_toml(tables, heading), encoding="utf-8")
