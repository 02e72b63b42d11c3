"""Digest of the content that decides a module's graph: state, code and what the code refers to.

Code is followed from the classes of a module's parts: methods, closures, and the globals that
functions name, with their values. Functions of torch and of Python's own library count by name,
those of installed packages also by their code; versions of packages are part of the cache's key.
Parameters count by shape and dtype, all other tensors by their values.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_pulse.tracing.graph_analysis import TORCH
from megatron_pulse.tracing.initial_weights.meta_init import has_no_memory

_PACKAGES = Path(__file__).parents[3]
_OURS = tuple(str(_PACKAGES / name) for name in ("megatron_pulse", "model_specs"))
_PYTHON = sysconfig.get_paths()["stdlib"]
_BY_REPR = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
    re.Pattern, PurePath, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator, types.GenericAlias,
)  # fmt: skip
_BY_NAME = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, types.ModuleType,
)  # fmt: skip
_NO_CONTENT = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
     "_abc_impl", "__parameters__", "__orig_bases__", "__dataclass_fields__", "__match_args__",
     "__dataclass_params__", "__wrapped__"}
)  # fmt: skip

_DEFAULTED = "_use_default_values"
"""Names of the settings of a diffusers model that keep their defaults, in any order."""


class UnknownContent(ValueError):
    """Object whose content cannot be told, such as a lock, a generator or an open file."""


def digest_of(*values: Any) -> str:
    """Digest that is equal for equal content, also in other processes; raises UnknownContent."""
    return _Digest().of(values)


def is_library(file: str) -> bool:
    """True for files of installed packages, of Python and of this project."""
    return "-packages" in file or file.startswith((_PYTHON, TORCH, *_OURS))


class _Digest:
    """Objects are numbered as they are found, and refer to each other by number.

    ``strict`` objects are known whole; of others, which the code of libraries refers to, only
    constants, functions and classes count.
    """

    def __init__(self) -> None:
        self._number: dict[int, int] = {}
        self._strict: set[int] = set()
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # an identity is unique only while its object lives
        self._queue: deque[tuple[Any, str, bool]] = deque()

    def of(self, values: tuple[Any, ...]) -> str:
        digest = hashlib.sha256()
        self._refer(values, "", True)
        while self._queue:
            value, where, strict = self._queue.popleft()
            for item in self._record(value, where, strict):
                digest.update(item if isinstance(item, bytes) else item.encode())
                digest.update(b"\0")
            digest.update(b"\1")
        return digest.hexdigest()

    def _refer(self, value: Any, where: str, strict: bool) -> str:
        if _is_constant(value):
            return f"{type(value).__name__} {value!r}"
        if id(value) not in self._number:
            self._number[id(value)] = len(self._number)
            self._kept.append(value)
        elif not strict or id(value) in self._strict:
            return f"#{self._number[id(value)]}"
        if strict:
            self._strict.add(id(value))
        self._queue.append((value, where, strict))
        return f"#{self._number[id(value)]}"

    def _record(self, value: Any, where: str, strict: bool) -> Iterator[str | bytes]:
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, _BY_NAME):
            name = getattr(value, "__qualname__", value.__name__)
            yield f"{getattr(value, '__module__', '')}.{name}"
        elif isinstance(value, logging.Logger):
            yield value.name
        elif isinstance(value, Enum):
            yield value.name
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, strict)
        elif isinstance(value, type):
            yield from self._class(value, where)
        elif (parts := self._wrapped(value)) is not None:
            for part in parts:
                yield self._refer(part, where, strict)
        elif not strict:
            return
        elif isinstance(value, Tensor):
            yield from self._tensor(value, where)
        else:
            yield self._refer(kind, where, True)
            yield from self._object(value, where)

    def _wrapped(self, value: Any) -> tuple[Any, ...] | None:
        """Content of an object that is called like a function; None for other objects."""
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return value.fget, value.fset, value.fdel
        if isinstance(value, functools._lru_cache_wrapper):
            return (value.__wrapped__,)
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        return None

    def _object(self, value: Any, where: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, each in value.items():
                if key != _DEFAULTED:
                    yield self._refer(key, where, True)
                    yield self._refer(each, f"{where}[{key!r:.40}]", True)
        elif isinstance(value, list | tuple | deque):
            for i, each in enumerate(value):
                yield self._refer(each, f"{where}[{i}]" if where else "", True)
        elif isinstance(value, set | frozenset):
            if not all(isinstance(each, _BY_REPR) for each in value):
                raise UnknownContent(f"{where} is a set of objects")
            yield from sorted(f"{type(each).__name__} {each!r}" for each in value)
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif not isinstance(value, nn.Module | types.SimpleNamespace) and not _is_plain(value):
            raise UnknownContent(f"{where or 'it'} is of type {type(value).__name__}")
        for name, each in sorted(getattr(value, "__dict__", {}).items()):
            if name != _DEFAULTED:
                yield name
                yield self._refer(each, f"{where}.{name}".lstrip("."), True)
        for name in _slots(type(value)):
            yield f"{name} {self._refer(getattr(value, name, None), f'{where}.{name}', True)}"

    def _tensor(self, value: Tensor, where: str) -> Iterator[str | bytes]:
        is_known = type(value) in (Tensor, nn.Parameter, nn.Buffer)
        if not is_known or value.layout is not torch.strided:
            raise UnknownContent(f"{where} is a {type(value).__name__} of {value.layout}")
        about = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        memory = value.untyped_storage()._cdata
        shared = self._storages.setdefault(memory, len(self._storages)), value.storage_offset()
        yield f"{about} {shared}"
        if not isinstance(value, nn.Parameter) and not has_no_memory(value):
            flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            yield hashlib.sha256(flat.numpy()).digest()

    def _class(self, value: type, where: str) -> Iterator[str]:
        yield f"{value.__module__}.{value.__qualname__}"
        file = _file_of(value.__module__)
        if file.startswith((TORCH, _PYTHON)):
            return
        library = is_library(file)
        for base in value.__mro__[1:]:
            yield self._refer(base, where, not library)
        for name, each in sorted(vars(value).items()):
            if name in _NO_CONTENT:
                continue
            if library and name not in ("forward", "__call__") and (codes := _codes_of(each)):
                yield f"{name} {codes}"  # not followed: loading and saving name all of the package
            else:
                told = f"{value.__qualname__}.{name}"
                yield f"{name} {self._refer(each, told, not library)}"

    def _function(self, value: types.FunctionType, strict: bool) -> Iterator[str]:
        code, file, where = value.__code__, value.__code__.co_filename, value.__qualname__
        own = not is_library(file)
        yield f"{value.__module__}.{value.__qualname__}"
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield self._refer(content, f"{where}'s {name}", strict or own)
        for name, each in vars(value).items():
            yield f"{name} {self._refer(each, f'{where}.{name}', own)}"
        if file.startswith((TORCH, _PYTHON)):
            return
        yield _code(code)
        yield self._refer(value.__defaults__, where, strict or own)
        yield self._refer(value.__kwdefaults__, where, strict or own)
        names = _names(code)
        places: list[Mapping[str, Any]] = [value.__globals__]
        known = {id(value.__globals__)}
        for place in places:  # grows by the modules among the globals, whose members code names
            for name in sorted(names & place.keys()):
                each = place[name]
                yield f"{name} {self._refer(each, f'{where}: {name}', own)}"
                if isinstance(each, types.ModuleType) and id(vars(each)) not in known:
                    known.add(id(vars(each)))
                    places.append(vars(each))


def _is_constant(value: Any, depth: int = 4) -> bool:
    """True if ``repr`` tells all of an object, whose identity does not matter.

    Export replaces containers among a module's attributes by copies.
    """
    if type(value) in (list, tuple):
        return depth > 0 and all(_is_constant(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and _is_constant([*value.keys(), *value.values()], depth)
    return isinstance(value, _BY_REPR) and not isinstance(value, Enum)


def _codes_of(member: Any) -> list[str]:
    """Code of a method, class method, static method or property; empty for other members."""
    parts = [
        getattr(each, "__func__", each)
        for each in ((member.fget, member.fset) if isinstance(member, property) else (member,))
    ]
    return [_code(each.__code__) for each in parts if isinstance(each, types.FunctionType)]


def _is_plain(value: Any) -> bool:
    """True if an object has no content besides its attributes."""
    plainly = ("__reduce__", "__reduce_ex__", "__getstate__")
    if any(getattr(type(value), name) is not getattr(object, name) for name in plainly):
        return False
    try:
        value.__reduce_ex__(2)  # refuses what C code keeps in an object
    except TypeError:
        return False
    return True


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _code(code: types.CodeType) -> str:
    """Digest of code, without lines and files."""
    consts = [
        _code(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    flags = code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags
    told = (code.co_code, consts, names, flags, code.co_exceptiontable)
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _constant(value: Any) -> str:
    """Constant of code; a frozenset's order differs between processes."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _names(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _file_of(module: str) -> str:
    """File of a Python module; those without one are built in."""
    known = sys.modules.get(module)
    return getattr(known, "__file__", None) or (_PYTHON if module == "builtins" or known else "")
