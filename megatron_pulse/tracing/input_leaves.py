"""Leaves of a module's nested inputs, by the caller's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def leaves_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a module's inputs by name, such as ``added_cond_kwargs_text_embeds``."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    return {name_of(path): leaf for path, leaf in paths}


def name_of(path: Sequence[Any]) -> str:
    """Name of the leaf at ``path``."""
    return "_".join(
        str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
        for part in path
    )


def one_name(given: Mapping[str, Any]) -> Iterator[str]:
    """Faults for leaves with equal names."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    first: dict[str, str] = {}
    for path, _ in paths:
        here = str(getattr(path[0], "key", path[0])) + "".join(map(str, path[1:]))
        if (before := first.setdefault(name_of(path), here)) != here:
            yield f"{before} and {here} would both be called {name_of(path)}: rename one of them"


def parents_of(given: Mapping[str, Any]) -> dict[str, set[str]]:
    """Names of all containers around each leaf, including its own name."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    return {name_of(p): {name_of(p[: i + 1]) for i in range(len(p))} for p, _ in paths}
