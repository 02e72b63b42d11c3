"""Sources of a derived chain's initial tensors, each read on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.published_weights import PublishedError, is_finite, names_on_load, torn

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FAR = 2.0**-6
"""Relative tolerance for buffers; a larger difference is due to training, not to rounding."""


@dataclass(frozen=True)
class Weights:
    """Source of initial weights.

    - ``parameters``: a module's parameters by qualified name, for a run's seed.
    - ``buffers``: buffers with other values than in the module.
    - ``is_new``: requested parameters have no other owner.
    - ``check``: raises faults that can be found before a tensor is read.
    """

    parameters: Callable[[int], Mapping[str, Tensor]]
    buffers: Callable[[], Mapping[str, Tensor]] = dict
    is_new: bool = False
    check: Callable[[], object] = lambda: None


def on_first_use(make: Callable[[], Weights]) -> Weights:
    """Weights that ``make`` returns, called on first use."""
    made = functools.cache(make)
    return Weights(lambda seed: made().parameters(seed), lambda: made().buffers(), check=made)


def from_module_itself(module: nn.Module) -> Weights:
    """Values of ``module`` at the time of use."""
    own = _Parameters(module)
    return Weights(lambda seed: own)


class _Parameters(Mapping[str, Tensor]):
    """A module's parameters; each is looked up on access, since layers ask one by one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._module.get_parameter(name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._module.named_parameters())

    def __len__(self) -> int:
        return len(list(iter(self)))


class TensorFiles(Protocol):
    """Tensors in files, each read on access."""

    def __getitem__(self, name: str) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, without reading it."""
        ...


def from_stored(stored: TensorFiles, module: nn.Module, place: str) -> Weights:
    """Weights of ``module``, which may be without memory, from files in ``place``.

    All names, shapes and dtypes are compared before a tensor is read. Every parameter must exist,
    and unknown names are refused. Floating-point precision may differ. Buffers are read if present.
    They are constants outside checkpoints, and must equal the module's own within rounding. A
    tied weight may be stored under all or some of its names, with equal values. Raises
    PublishedError with all faults.
    """
    state = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    found = names_on_load(module, stored)
    faults = [f"{name} is unexpected" for name in sorted(found.keys() - state.keys())]
    others = other_names(module)
    tied = {*others, *others.values()}
    names = _names(module, found)
    parameters = dict(module.named_parameters())
    faults += [f"{name} is missing" for name in parameters if name not in names]
    for name in sorted(found.keys() & state.keys()):
        faults += _unlike(name, stored.kind_of(found[name]), state[name])
    buffers = {name: tensor for name, tensor in module.named_buffers() if name in names}
    if not faults:
        faults = altered(buffers, {name: stored[names[name]] for name in buffers})
        faults += torn({name: stored[found[name]] for name in tied & found.keys()}, others)
    if faults:
        raise PublishedError(place, faults)
    read, constant = (
        _Renamed(stored, {name: names[name] for name in wanted}, place)
        for wanted in (parameters, buffers)
    )
    return Weights(lambda seed: read, lambda: constant)


def float8_of(values: Mapping[str, Tensor] | None, name: str) -> tuple[Tensor, Tensor] | None:
    """Float8 values and scale that the file of ``values`` holds for a tensor; None for others."""
    of_values = getattr(values, "as_float8", None)
    return None if of_values is None else of_values(name)


def altered(buffers: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Faults for buffers with other values in ``found``, beyond rounding."""
    faults = []
    for name, tensor in buffers.items():
        if tensor.is_meta or name not in found:
            continue
        wide = torch.promote_types(tensor.dtype, torch.float64)
        own, other = tensor.to(wide), found[name].to(wide)
        if not torch.allclose(own, other, rtol=0, atol=_FAR * float(own.abs().max() or 1)):
            faults.append(
                f"the buffer {name} differs from the value that the module computes. Buffers are "
                "constants here, and not in checkpoints. Make it a parameter with "
                "requires_grad=False"
            )
    return faults


def _names(module: nn.Module, found: Mapping[str, str]) -> dict[str, str]:
    """Parameters of the module in ``found``, with their stored names; any name of a tied weight."""
    others = other_names(module)
    names: dict[str, str] = {}
    for name, _ in _named(module):
        if name in found:
            names.setdefault(others.get(name, name), found[name])
    return names


def other_names(module: nn.Module) -> dict[str, str]:
    """The names that tied parameters and buffers of a module have beside their first, with that."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in _named(module)}
    return {name: own for name, own in names.items() if name != own}


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _unlike(name: str, kind: tuple[tuple[int, ...], torch.dtype], own: Tensor) -> Iterator[str]:
    shape, dtype = kind
    if shape != tuple(own.shape):
        yield f"{name} has the shape {list(shape)}, expected {list(own.shape)}"
    if dtype != own.dtype and not (dtype in _FLOATS and own.dtype in _FLOATS):
        there, here = (str(kind).removeprefix("torch.") for kind in (dtype, own.dtype))
        yield f"{name} has the type {there}, expected {here}"


class _Renamed(Mapping[str, Tensor]):
    """Stored tensors under the names in ``names``.

    Raises PublishedError on access to a tensor with NaN or infinite values.
    """

    def __init__(self, stored: TensorFiles, names: Mapping[str, str], place: str) -> None:
        self._stored, self._names, self._place = stored, names, place

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._stored[self._names[name]]
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if parts.is_floating_point() and not is_finite(parts):
            raise PublishedError(self._place, [f"{name} holds NaN or infinite values"])
        return tensor

    def as_float8(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Stored float8 values of a tensor and their scale; None if it is no float8."""
        of_stored = getattr(self._stored, "as_float8", None)
        held = None if of_stored is None else of_stored(self._names[name])
        if held is not None:
            self[name]  # which refuses NaN
        return held

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
