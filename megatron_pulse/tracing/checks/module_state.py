"""State of a module that a trace of tensors does not record.

Python state kept between calls, and parameters without a shape before the first call
(``nn.LazyLinear``).
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count, islice
from types import GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_DEEPEST, _MOST = 5, 1000
"""Limits on the depth of nested containers, and on inspected entries per container."""

_SMALL = 1 << 22
"""Most parameters of a module that is called to compare it with its chain."""

_OF_TORCH = frozenset((*vars(nn.Module()), "_flat_weights"))  # recurrent parts have the latter


_LIBRARIES = ("torch.", "megatron.", "megatron_pulse.", "transformer_engine.")
"""Libraries that may lie outside site-packages."""


def kept(module: nn.Module, libraries: bool = True) -> dict[str, Any]:
    """Python state by location, of all parts of ``module`` and of the source files of their
    classes.

    Covers numbers and texts, states of generators and iterators, and contents of lists, dicts and
    plain objects. Tensors in containers count by identity. Library files are excluded, and without
    ``libraries`` also parts of library classes.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        if not libraries and _is_library(type(part).__module__):
            continue
        for name, value in vars(part).items():
            if name not in _OF_TORCH and not isinstance(value, Tensor | None):
                found.update(_within(f"{prefix}.{name}".lstrip("."), value, 0, seen))
    for name, file in files_of(module).items():
        if not libraries and _is_library(name):
            continue
        for each, value in list(vars(file).items()):
            if not each.startswith("__") and not isinstance(value, Tensor | None):
                found.update(_within(f"{name}.{each}", value, 0, seen))
    return found


def forget_results(module: nn.Module) -> None:
    """Clear ``lru_cache`` results of functions in the files of ``module``'s classes.

    A trace would leave tensors without values in the caches, and would miss cached results of
    others.
    """
    for file in files_of(module).values():
        for owner in (file, *(each for each in vars(file).values() if isinstance(each, type))):
            for each in list(vars(owner).values()):
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()


def files_of(module: nn.Module) -> dict[str, ModuleType]:
    """Source files of the classes of a module's parts, by name, without libraries."""
    names = sorted({type(part).__module__ for part in module.modules()})
    return {
        name: sys.modules[name]
        for name in names
        if "site-packages"
        not in (getattr(sys.modules.get(name), "__file__", None) or "site-packages")
    }


def _is_library(name: str) -> bool:
    """True if the Python module ``name`` belongs to a library."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or name.startswith(_LIBRARIES)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Faults for locations whose state changed.

    During a trace a module may have parts under other names.
    """
    for where in {**before, **after}:
        if "[" not in where and not (where in before and where in after):
            continue
        if where not in before:
            yield f"{where} is created by the call: a chain would not have it"
        elif where not in after:
            yield f"{where} is deleted by the call: a chain would keep it"
        elif before[where] != after[where]:
            now = after[where]
            told = isinstance(now, bool | int | float | str)
            yield (
                f"{where} was {before[where]} before the call and is {now} after it: a chain would "
                "keep the first"
                if told
                else f"{where} is replaced by the call: a chain would keep the first"
            )


def _within(where: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool | int | float | str | None):
        yield where, value
    elif isinstance(value, Tensor):
        yield where, (id(value),)
    elif isinstance(value, random.Random):
        yield where, (value.getstate(),)
    elif isinstance(value, count):
        yield where, (repr(value),)
    elif isinstance(value, GeneratorType):
        yield where, (value.gi_frame and value.gi_frame.f_lasti,)
    elif hasattr(value, "bit_generator"):  # numpy's
        yield where, (str(value.bit_generator.state),)
    elif depth < _DEEPEST and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            entries = {f"{where}[{key!r:.40}]": each for key, each in islice(value.items(), _MOST)}
        elif isinstance(value, list | tuple | deque):
            entries = {f"{where}[{i}]": each for i, each in enumerate(islice(value, _MOST))}
        elif isinstance(value, nn.Module | type | ModuleType) or callable(value):
            entries = {}
        else:
            entries = {
                f"{where}.{name}": each for name, each in getattr(value, "__dict__", {}).items()
            }
        for place, each in entries.items():
            yield from _within(place, each, depth + 1, seen)


def complex_parameters(module: nn.Module) -> Iterator[str]:
    """A fault for each complex parameter."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            yield (
                f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but "
                "casts, gradient norms and optimizers here are for real numbers. Store it as "
                "torch.view_as_real(...) and call torch.view_as_complex in forward, or make it a "
                "buffer if it is not trained"
            )


def lazy_modules(module: nn.Module) -> Iterator[str]:
    """A fault for each module with lazy parameters or buffers."""
    for name, part in module.named_modules():
        own = (*part._parameters.items(), *part._buffers.items())
        if lazy := [each for each, tensor in own if is_lazy(tensor)]:
            yield (
                f"{name or 'it'} is a {type(part).__name__} whose shapes are not set yet "
                f"({', '.join(lazy)}). Give its sizes in the constructor, or call the module once "
                "with an example before pulse.from_module"
            )


def is_small(module: nn.Module) -> bool:
    """True if a module has few enough parameters for a trial."""
    count: int = sum(p.numel() for p in module.parameters())
    return count <= _SMALL
