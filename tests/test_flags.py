"""Flags as fields of a dataclass: one line each makes parser, value, checks and marks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from megatron_pulse.dataclass_flags import (
    ABOVE_ZERO,
    BELOW_ONE,
    add_flags,
    flag,
    flag_faults,
    flags_of,
    marked,
    read_flags,
    with_new_names,
)


@dataclass(frozen=True)
class Inner:
    size: int | None = flag("how large ({unsaid})", metavar="N")
    sure: bool | None = flag("or not")


@dataclass(frozen=True)
class Outer:
    seconds: float = flag("how long", 10.0, metavar="S", within=ABOVE_ZERO, marks=["kept"])
    share: float | None = flag("how much", within=BELOW_ONE)
    solver: Literal["highs", "none"] = flag("who", "highs")
    again: bool = flag(
        "anew", False, check=lambda o: "needs --x-solver highs" * (o.again and o.solver == "none")
    )
    options: Mapping[str, Any] = flag("overrides", {}, name="option")
    inner: Inner = flags_of(Inner, unsaid="as it was")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(Outer, parser, "x-")
    return parser.parse_args(list(words))


def test_what_is_not_given_is_at_its_default() -> None:
    assert read_flags(Outer, parsed(), "x-") == Outer()
    assert read_flags(Outer, argparse.Namespace(), "x-") == Outer()


def test_every_kind_is_read() -> None:
    words = "--x-seconds 2 --x-share 0.5 --x-solver none --x-again --x-option a=1 --x-option b=c=d"
    args = parsed(*words.split(), "--x-size", "3", "--no-x-sure")
    options = {"a": "1", "b": "c=d"}
    assert read_flags(Outer, args, "x-") == Outer(2.0, 0.5, "none", True, options, Inner(3, False))


def test_every_fault_is_found() -> None:
    args = parsed(*"--x-seconds 0 --x-share nan --x-solver none --x-again".split())
    assert list(flag_faults(read_flags(Outer, args, "x-"), "x-")) == [
        "--x-seconds is 0; it must be above 0",
        "--x-share is nan; it must be finite, at least 0 and below 1",
        "--x-again needs --x-solver highs",
    ]
    with pytest.raises(ValueError, match=r"(?s)--x-option a: .*--x-option b: write it as KEY"):
        read_flags(Outer, parsed("--x-option", "a", "--x-option", "b"), "x-")


def test_help_and_marks() -> None:
    parser = argparse.ArgumentParser()
    add_flags(Outer, parser, "x-")
    assert "--x-size N" in parser.format_help() and "how large (as it was)" in parser.format_help()
    assert marked(Outer, "kept") == ["seconds"]


def test_renamed_flags_and_values_are_accepted_and_say_their_new_names() -> None:
    words = "--worlds 4,2 --pulse-encode vae=front --pulse-encode=front --no-split x".split()
    new = "--world-sizes 4,2 --pulse-encoder-schedule vae=before-step "
    new += "--pulse-encoder-schedule=before-step --no-split-backward x"
    found, told = with_new_names(words)
    assert found == new.split()
    assert "--worlds is now called --world-sizes" in told and len(told) == 4
    assert "--pulse-encoder-schedule front is now called before-step" in told
    assert with_new_names(found) == (found, [])
