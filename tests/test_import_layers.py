"""Import layers: each package imports only from those before it, without circles."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    "megatron_pulse",  # the ground floor: errors, files, processes ...
    "megatron_pulse.backbone",
    "megatron_pulse.adapters",
    "megatron_pulse.tracing",
    "megatron_pulse.diffusion",
    "megatron_pulse.encoders",
    "megatron_pulse.data",
    "megatron_pulse.profile",
    "megatron_pulse.planner.cluster",
    "megatron_pulse.planner.layout",
    "megatron_pulse.planner.partition",
    "megatron_pulse.planner.schedule",
    "megatron_pulse.planner.bubble_fill",
    "megatron_pulse.planner.program",
    "megatron_pulse.planner.plan_file",
    "megatron_pulse.planner.tune",
    "megatron_pulse.planner.trace",
    "megatron_pulse.planner.draw",
    "megatron_pulse.runtime",
    "model_specs",
    "megatron_pulse.integration",
    "megatron_pulse.recipe",
    "megatron_pulse.cli",
)
"""From the ground up: a room imports from those before it, and from itself."""
DOORS = {"megatron_pulse"}
"""Modules that open other rooms to users, whatever those import; nothing in the house uses them."""


def modules() -> dict[str, Path]:
    paths = [p for top in ("megatron_pulse", "model_specs") for p in (ROOT / top).rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return {n.removesuffix(".__init__"): p for n, p in zip(names, paths, strict=True)}


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it, for types only too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


@functools.cache
def arrows() -> dict[str, set[str]]:
    return {
        name: {other for other in imported(path) if other in MODULES and other != name}
        for name, path in MODULES.items()
        if name not in DOORS
    }


def room_of(name: str) -> int:
    return max(
        (i for i, room in enumerate(ORDER) if name == room or name.startswith(f"{room}.")),
        key=lambda i: len(ORDER[i]),
    )


def test_no_arrow_runs_back_up():
    wrong = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in sorted(others)
        if room_of(other) > room_of(name) or other in DOORS
    ]
    assert not wrong, "\n".join(wrong)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Its strongly connected parts of more than one (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = []
            while not part or part[-1] != node:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_no_module_imports_itself_by_way_of_others():
    assert circles(arrows()) == []


@pytest.mark.parametrize("room", [room for room in ORDER if room not in DOORS])
def test_no_two_rooms_in_one_import_each_other(room):
    """What lies loose in a room may be under its smaller rooms, and over them."""
    between = defaultdict(set)
    for name, others in arrows().items():
        if not name.startswith(f"{room}."):
            continue
        here = name.removeprefix(f"{room}.").split(".")
        for other in others:
            there = other.removeprefix(f"{room}.").split(".")
            if other.startswith(f"{room}.") and min(len(here), len(there)) > 1:
                if here[0] != there[0]:
                    between[here[0]].add(there[0])
    assert circles(between) == []


def test_no_name_of_a_class_means_two_things():
    """In the package; families of models each have a head, an attention and so on of their own."""
    named = defaultdict(list)
    for name, path in MODULES.items():
        if name.startswith("megatron_pulse"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    named[node.name].append(name)
    assert {word: where for word, where in named.items() if len(where) > 1} == {}
