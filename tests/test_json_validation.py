"""Values of files as their types: nothing is converted, and every fault names place and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NotRequired, TypedDict

import pytest
from annotated_types import Gt, Le

from megatron_pulse.errors import Faults
from megatron_pulse.json_validation import Count, OneOf, Some, faults_of, open_ended, validated


@dataclass(frozen=True)
class Link:
    kind: Annotated[str, OneOf(("near", "far"))]
    seconds: Annotated[float, Gt(0), Le(1e9), "seconds"]
    users: Count = 1


@open_ended
class Cable(TypedDict):
    length: Annotated[float, Gt(0)]
    links: NotRequired[Some[Link]]


def test_whole_numbers_are_numbers_and_nothing_else_is_converted() -> None:
    made = validated(Link, {"kind": "near", "seconds": 2})
    assert made == Link("near", 2.0) and type(made.seconds) is float
    for wrong in ("2", True, None, [2], float("nan")):
        assert faults_of(Link, {"kind": "near", "seconds": wrong}) == [
            f"seconds is {wrong!r}; allowed is a number above 0, at most 1e9: seconds"
        ]
        assert faults_of(Cable, {"length": wrong}) == [
            f"length is {wrong!r}; allowed is a number above 0"
        ]
    assert faults_of(Link, {"kind": "near", "seconds": 1, "users": 2.0}) == [
        "users is 2.0; allowed is a whole number, 1 or more"
    ]


def test_faults_of_all_places_are_listed() -> None:
    links = [{"kind": "x", "seconds": 1, "user": 1}, {"kind": "far"}, 3]
    assert faults_of(Cable, {"length": 1, "colour": "red", "links": links}) == [
        "links.0.kind is 'x'; allowed is one of near, far",
        "links.0.user is unknown; did you mean users? allowed are kind, seconds, users",
        "links.1.seconds is missing; allowed is a number above 0, at most 1e9: seconds",
        "links.2 is 3; allowed is an object: kind, seconds, users",
    ]
    assert faults_of(Cable, {"length": 1, "links": []}) == [
        "links is []; allowed is a list, not empty, each an object: kind, seconds, users"
    ]


def test_fields_with_defaults_are_required_of_complete_values() -> None:
    with pytest.raises(Faults, match="^users is missing; allowed is a whole number, 1 or more$"):
        validated(Link, {"kind": "near", "seconds": 1}, complete=True)


def test_of_a_large_file_a_list_shows_its_first_fault() -> None:
    links = [{"kind": "x", "seconds": 0}] * 200_000
    first, second, more = faults_of(Cable, {"length": 1, "links": links})
    assert first.startswith("links.0.kind is 'x'") and second.startswith("links.0.seconds is 0")
    assert more.startswith("and maybe more: ")
