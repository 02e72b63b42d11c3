"""Bytes that layers keep from forward to backward, and the most that one has in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measuring.layer_call import LayerCall


@dataclass(frozen=True)
class Kept:
    """What one layer keeps: bytes of its own, and which boundary tensors, in and out."""

    own_bytes: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]


class KeptStorages:
    """Within, collects the storages that autograd keeps of a layer's forward."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def __enter__(self) -> KeptStorages:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)

    def count(self, outputs: Sequence[Tensor]) -> Kept:
        """What was kept; ``outputs`` are the boundary tensors that the forward returned.

        See ``profile`` for what counts as the layer's own.
        """
        call = self._call
        taken = [_storage(tensor) for tensor in call.boundary]
        returned = [_storage(tensor) for tensor in outputs]
        constant = (*call.module.parameters(), *call.module.buffers(), *call.shared)
        others = {_storage(tensor) for tensor in (*constant, *call.skips.values())}
        own = self._kept.keys() - others - set(taken) - set(returned)
        return Kept(
            sum(self._kept[key] for key in own),
            tuple(key in self._kept for key in taken),
            tuple(key in self._kept and key not in taken and key not in others for key in returned),
            tuple(tensor.untyped_storage().nbytes() for tensor in call.boundary),
            tuple(tensor.untyped_storage().nbytes() for tensor in outputs),
        )


def saved_bytes(backbone: Backbone, kept: Sequence[Kept]) -> list[int]:
    """Every layer's ``saved_bytes`` as ``profile`` defines them, from what each layer keeps."""
    totals = []
    for i, layer in enumerate(kept):
        held = list(layer.inputs)
        if i:
            pushed = set(backbone.layers[i - 1].pushes.values())
            held = [
                kept_here or kept_before or j in pushed
                for j, (kept_here, kept_before) in enumerate(
                    zip(held, kept[i - 1].outputs, strict=True)
                )
            ]
        total = layer.own_bytes
        total += sum(n for n, holds in zip(layer.input_bytes, held, strict=True) if holds)
        if i == len(kept) - 1:
            ends = zip(layer.output_bytes, layer.outputs, strict=True)
            total += sum(n for n, holds in ends if holds)
        totals.append(total)
    return totals


@contextmanager
def live_bytes(call: LayerCall) -> Iterator[LiveBytes]:
    """Follow the bytes of what ``call`` makes; a parameter's gradient is let go of when it is
    complete, as it is then added to the sum over microbatches, which is not counted here."""
    live = LiveBytes()
    hooks = [parameter.register_hook(live.let_go) for parameter in call.trained]
    try:
        with live:
            yield live
    finally:
        for hook in hooks:
            hook.remove()


class LiveBytes(TorchDispatchMode):
    """Within, follows the bytes of the tensors that operators make; ``peak`` is the most at once.

    Works on tensors without memory too. What a kernel needs while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given | self._alive.keys():
                storage = leaf.untyped_storage()
                self._alive[_storage(leaf)] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, _storage(leaf), None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result

    def let_go(self, tensor: Tensor) -> None:
        """Count ``tensor`` as if it were gone."""
        self._alive.pop(_storage(tensor), None)


def _storage(tensor: Tensor) -> int:
    """What identifies a tensor's storage while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
