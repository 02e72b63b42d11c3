"""Kernels of a device: every operator below autograd, with its operations and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_pulse.profile.roofline import Kernel


class Kernels(TorchDispatchMode):
    """Dispatch mode that lists executed kernels in order.

    Eager torch runs about one kernel per operator. A kernel reads each of its tensors once and
    writes its results once. Views and allocations are no kernels. Norms, which read their input
    twice, are slightly underestimated. A compiler that fuses operators would be faster.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all: list[Kernel] = []

    @property
    def count(self) -> int:
        """Number of kernels so far."""
        return len(self._all)

    @contextmanager
    def record(self) -> Iterator[list[Kernel]]:
        """Collect the kernels of the context in a list."""
        kernels: list[Kernel] = []
        start = len(self._all)
        yield kernels
        kernels += self._all[start:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not written or "empty" in func.__name__ or _is_view(func, read, written):
            return result
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        self._all.append(Kernel(int(flops), sum(map(_num_bytes, (*read, *written)))))
        return result


def _is_view(func: Any, read: list[Tensor], written: list[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in read}
    return all(tensor.untyped_storage()._cdata in storages for tensor in written)


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; elements repeated by ``expand`` count once."""
    return int(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()))
