"""What a module is called with, leaf by leaf, by the caller's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def leaves_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of what a module is called with: ``added_cond_kwargs_text_embeds``."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    return {name_of(path): leaf for path, leaf in paths}


def name_of(path: Sequence[Any]) -> str:
    """The name of a leaf, of its path in what a module is called with."""
    return "_".join(
        str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
        for part in path
    )


def one_name(given: Mapping[str, Any]) -> Iterator[str]:
    """A fault for leaves that have one name."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    first: dict[str, str] = {}
    for path, _ in paths:
        here = str(getattr(path[0], "key", path[0])) + "".join(map(str, path[1:]))
        if (before := first.setdefault(name_of(path), here)) != here:
            yield f"{before} and {here} would both be called {name_of(path)}: rename one of them"


def parents_of(given: Mapping[str, Any]) -> dict[str, set[str]]:
    """The names of all that each leaf is within, and its own."""
    paths, _ = pytree.tree_flatten_with_path(dict(given))
    return {name_of(p): {name_of(p[: i + 1]) for i in range(len(p))} for p, _ in paths}
