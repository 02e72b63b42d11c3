"""Flags of a training, from its recipe.

    flags, faults = training_flags(recipe)     # ["--pulse-backbone", "uvit-s", ...], []

One path of checks: what a value may be is decided by its flag, when the training starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.dataclass_flags import flag_value
from megatron_pulse.errors import did_you_mean
from megatron_pulse.integration.flags.megatron_flags import load_table
from megatron_pulse.recipe.keys import TABLES, Data, Recipe

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in ``output``."""
TENSORBOARD = "tensorboard"
SAMPLES = "samples"
_WHOLE = ("full", "selective")
"""Values of ``parallel.recompute`` that mean all layers."""


def training_flags(recipe: Recipe) -> tuple[list[str], list[str]]:
    """(flags, faults) of the training, the flags as words.

    Those of a backbone that the weights name are not among them. Faulty are Megatron's flags that
    do not exist or have a key of their own.
    """
    output, words = Path(recipe.output), list[str]()
    for table in TABLES:
        words += _table_words(getattr(recipe, table))
    words += _sources_words(recipe.data)
    words += ["--save", str(output / CHECKPOINTS), "--tensorboard-dir", str(output / TENSORBOARD)]
    if recipe.samples.every is not None and recipe.samples.folder is None:
        words += ["--pulse-sample-folder", str(output / SAMPLES)]
    if is_auto(recipe) and recipe.parallel.auto is None:
        words.append("--pulse-auto")
    if recipe.training.dtype != "fp32":
        words.append(f"--{recipe.training.dtype}")
    if not recipe.log.progress:
        words.append("--pulse-no-progress")
    further, faults = _megatron_words(recipe.megatron)
    return [*words, *further], faults


def is_auto(recipe: Recipe) -> bool:
    """True if the training profiles and tunes by itself: unless a plan or a layout is given."""
    parallel = recipe.parallel
    if parallel.auto is not None:
        return parallel.auto
    degrees = (
        *(parallel.pipeline, parallel.tensor, parallel.context),
        *(parallel.placement, parallel.fsdp),
    )
    return not (parallel.plan or any(degrees)) and not (recipe.model.backbone or "").startswith(
        "cascade:"
    )


def _table_words(table: Any) -> Iterator[str]:
    assert is_dataclass(table)
    for each in fields(table):
        value, flag = getattr(table, each.name), each.metadata["flag"]
        if not flag or value is None or value is False and flag != "--pulse-zero-terminal-snr":
            continue
        if each.name == "buckets" and isinstance(value, tuple):
            yield from (flag, ",".join(f"{width}x{height}" for width, height in value))
        elif each.name == "recompute" and len(value) == 1 and value[0] in _WHOLE:
            yield from ("--recompute-granularity", value[0])
        else:
            yield from _words(flag, value)


def _sources_words(data: Data) -> Iterator[str]:
    """Words of the data and captions of several sources."""
    if not data.sources:
        return
    names = [
        source.path if source.repeats is None else f"{source.path}*{source.repeats}"
        for source in data.sources
    ]
    yield from ("--pulse-data", ",".join(names))
    prefixes = [source.caption_prefix or "" for source in data.sources]
    for prefix in prefixes if any(prefixes) else ():
        yield from _words("--pulse-caption-prefix", prefix)


def _words(flag: str, value: Any) -> Iterator[str]:
    """Words of a flag, or of several, with their values."""
    if " " in flag:
        for one, part in zip(flag.split(), value, strict=True):
            yield from _words(one, part)
    elif value is False:
        yield f"--no-{flag[2:]}"
    elif value is True:
        yield flag
    elif isinstance(value, Mapping):
        for name, one in _flat(value):
            yield from (flag, f"{name}={flag_value(one)}")
    elif isinstance(value, tuple):
        for one in value:
            yield from _words(flag, one)
    elif (text := str(value)).startswith("-"):
        yield f"{flag}={text}"  # argparse would take the next word for a flag
    else:
        yield from (flag, text)


def _flat(table: Mapping[str, Any], chain: str = "") -> Iterator[tuple[str, Any]]:
    """Options with their values; those of a table have its name, the chain, before theirs."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{chain}{name}.")
        else:
            yield f"{chain}{name}", value


def keys_by_flag() -> dict[str, str]:
    """Key of a recipe for each flag that has one."""
    return {
        flag: f"{table}.{each.name}"
        for table, kind in TABLES.items()
        for each in fields(kind)
        for flag in each.metadata["flag"].split()
    } | {
        "--save": "output",
        "--tensorboard-dir": "output",
        "--bf16": "training.dtype",
        "--fp16": "training.dtype",
        "--recompute-granularity": "parallel.recompute",
        "--pretrained-checkpoint": "model.weights",
        "--nproc-per-node": "parallel.devices",
        # of the import of weights
        "--from": "model.weights",
        "--backbone": "model.backbone",
        "--module": "model.module",
        "--option": "model.options",
        "--controlnet": "model.controlnet",
        "--null-class": "model.null_class",
    }


def _megatron_words(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(words, faults) of the table ``megatron``.

    Its keys are flags without dashes, or with underscores.
    """
    names = {_plain(name): name for name in load_table()}
    own = keys_by_flag()
    words, faults = list[str](), list[str]()
    for key, value in given.items():
        flag = names.get(_plain(key))
        if flag is None:
            near = did_you_mean(key, (name[2:] for name in names.values()))
            faults.append(f"megatron.{key} is no flag of Megatron; {near}".rstrip("; "))
        elif flag in own:
            faults.append(f"megatron.{key} has a key of its own: {own[flag]}")
        elif value is False:
            faults.append(f"megatron.{key} is false: leave it out")
        elif isinstance(value, dict):
            faults.append(f"megatron.{key} is a table; a flag takes a value or a list of values")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += _words(flag, value)
    return words, faults


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")
