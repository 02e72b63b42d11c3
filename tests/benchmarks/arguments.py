"""What benchmarks are given: kinds for ``argparse``, which says what is none of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection


def positive(text: str) -> float:
    """A number above 0 that is finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return value


def positives(text: str) -> list[float]:
    """Numbers with commas between."""
    return list(map(positive, text.split(",")))


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Names with commas between, all ``known``."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(repr, unknown))}: there are {', '.join(known)}"
            )
        return found

    return names
