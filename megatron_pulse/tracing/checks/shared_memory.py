"""Detection of a module's tensors that share memory, which in a chain would be separate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


class _Span(NamedTuple):
    begin: int
    end: int
    name: str
    is_trained: bool


def shared_memory(module: nn.Module, constants: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Faults where a trained parameter shares memory with another tensor of ``module``.

    Checked are parameters, buffers, attributes (also in lists and dicts) and ``constants``. One
    tensor in two places, a tied weight, is allowed. Fake tensors left by a trace are faults.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*_tensors(module), *(constants or {}).items()):
        if not isinstance(tensor, Tensor):
            continue
        if is_functorch_wrapped_tensor(tensor):
            yield "torch.func's transforms (grad, vjp) in forward are not traced"
        elif isinstance(tensor, FakeTensor):
            yield (
                f"{name} is created in forward and kept in the module: after tracing it has no "
                "values"
            )
        elif tensor.layout is torch.strided and tensor.numel():
            found.setdefault(id(tensor), (name, tensor))
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    by_memory: dict[Any, list[_Span]] = {}
    for key, (name, tensor) in found.items():
        memory, begin, end = _place(tensor)
        by_memory.setdefault(memory, []).append(_Span(begin, end, name, key in trained))
    for spans in by_memory.values():
        for one, other in _overlapping(spans):
            if one.is_trained or other.is_trained:
                yield (
                    f"{one.name} and {other.name} share memory: in a chain they would be separate "
                    f"tensors, and training would change only one; {_remedy(one.name, other.name)}"
                )


def _remedy(one: str, other: str) -> str:
    if f"{one}_orig" == other:
        return "for spectral_norm, use torch.nn.utils.parametrizations"
    return "use one parameter in both places"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OF_MODULES:
                for leaf in pytree.tree_leaves(value):
                    yield f"{prefix}.{name}".lstrip("."), leaf


_OF_MODULES = vars(nn.Module()).keys()


def _place(tensor: Tensor) -> tuple[Any, int, int]:
    """Memory of a tensor, with its first and last byte."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    length = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if storage.data_ptr():
        return tensor.device, tensor.data_ptr(), tensor.data_ptr() + length * size
    begin = tensor.storage_offset() * size  # such as on the meta device
    return storage._cdata, begin, begin + length * size


def _overlapping(spans: Iterable[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """Pairs of overlapping spans: each span with an earlier one that ends later."""
    last: _Span | None = None
    for span in sorted(spans):
        if last is not None and span.begin < last.end:
            yield last, span
        if last is None or span.end > last.end:
            last = span
