"""Names and options of cascades: several backbones in one run.

  cascade:base=unet-mnist,upper=sd-v1.5        options base.sample_size=32, upper.train_batch=...

Every part is a named configuration of a family. An option begins with the name of its chain.
"""

from __future__ import annotations

from collections.abc import Mapping

from model_specs.common.options import Value

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
        if not (chain and equals and backbone) or chain in parts or ":" in backbone:
            why = "is there twice" if chain in parts else "is not CHAIN=BACKBONE"
            if ":" in backbone:
                why = "is of a module, which cannot be part of a cascade"
            raise ValueError(
                f"{name}: {text!r} {why}: write {PREFIX}base=NAME,upper=NAME, each NAME one of "
                "'pulse backbones'"
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
        raise ValueError(
            f"{name}: options begin with their chain's name, as {next(iter(chains))}.{lost[0]}; "
            f"these do not: {', '.join(lost)}"
        )
