"""Classification of names with a colon: diffusers modules, user code, cascades.

  cascade:base=unet-mnist,upper=sd-v1.5        options base.sample_size=32, upper.train_batch=...

Every part of a cascade is a named configuration of a family, or a module. An option begins with the
name of its chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from model_specs.common.options import Value
from model_specs.derived import diffusers_modules, own
from model_specs.derived.family import DerivedFamily
from model_specs.derived.user_code import allow as allow_code


def is_module(name: str) -> bool:
    """True for the name of a module or of user code, not of a configuration or a cascade."""
    return ":" in name and not is_cascade(name)


def is_code(name: str) -> bool:
    """True for the name of user code."""
    return is_module(name) and not name.startswith(diffusers_modules.PREFIX)


def misnamed(name: str) -> str:
    """Error text for a malformed module name; empty if the form is valid."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            return f"{name} is a file. Write {name}:FACTORY, where FACTORY is a function in it"
        return f"{name} is a folder. Write diffusers:{name}" if Path(name).is_dir() else ""
    kind, _, target = name.partition(":")
    prefix = diffusers_modules.PREFIX
    if kind.lower() == prefix[:-1] and not name.startswith(prefix):
        return f"{name}: did you mean {prefix}{target}?"
    if name.startswith(prefix):
        return _misnamed_file(name, Path(target)) if Path(target).is_file() else ""
    if not place or not attribute:
        what = "function after" if place else "file or package before"
        return f"{name} has no {what} the colon. Write FILE.py:FACTORY or PACKAGE.MODULE:FACTORY"
    return ""


def _misnamed_file(name: str, file: Path) -> str:
    from megatron_pulse.diffusion.published import names_in
    from megatron_pulse.diffusion.single_file_refusal import original_faults

    if faults := original_faults(file, names_in(file)):
        return f"{name}: {faults[0]}"
    return f"{name} is a file. Give its folder, {diffusers_modules.PREFIX}{file.parent}"


def allow(name: str) -> None:
    """Permit running the code that ``name``, or a part of a cascade, names.

    For names from the command line of this process.
    """
    named = [name]
    if is_cascade(name):
        with suppress(ValueError):  # loading the backbone reports it
            named = list(parts_of(name).values())
    for each in filter(is_code, named):
        allow_code(each)


def family_of(name: str) -> DerivedFamily:
    """Family of a module name (see ``diffusers_modules`` and ``own``). Raises ValueError."""
    if fault := misnamed(name):
        raise ValueError(fault)
    return own.family_of(name) if is_code(name) else diffusers_modules.family_of(name)


PREFIX = "cascade:"


def is_cascade(name: str) -> bool:
    """True if ``name`` is the name of a cascade."""
    return name.startswith(PREFIX)


def parts_of(name: str) -> dict[str, str]:
    """Backbone names of a cascade by chain name.

    Raises ValueError unless ``name`` has the form ``cascade:CHAIN=BACKBONE,CHAIN=BACKBONE``.
    """
    parts: dict[str, str] = {}
    for text in name.removeprefix(PREFIX).split(","):
        chain, equals, backbone = text.partition("=")
        if not (chain and equals and backbone) or chain in parts:
            why = "is given twice" if chain in parts else "is not CHAIN=BACKBONE"
            raise ValueError(
                f"{name}: {text!r} {why}. Write {PREFIX}base=NAME,upper=NAME, each NAME one of "
                "'pulse backbones', diffusers:FOLDER, diffusers:CLASS or FILE.py:FACTORY"
            )
        parts[chain] = backbone
    return parts


def options_of(chain: str, options: Mapping[str, Value]) -> dict[str, Value]:
    """Options of one chain, without the chain's prefix."""
    start = f"{chain}."
    return {key[len(start) :]: v for key, v in options.items() if key.startswith(start)}


def require_known(name: str, options: Mapping[str, Value]) -> None:
    """Raise ValueError for options whose prefix is no chain of ``name``."""
    chains = parts_of(name)
    if lost := [key for key in options if key.partition(".")[0] not in chains or "." not in key]:
        example = lost[0].rpartition(".")[2]
        example = "OPTION" if example in chains else example
        raise ValueError(
            f"{name}: options must begin with a chain name, e.g. {next(iter(chains))}.{example}; "
            f"faulty: {', '.join(lost)}"
        )
