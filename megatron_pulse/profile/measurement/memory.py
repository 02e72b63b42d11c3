"""Bytes that layers keep from forward to backward, and their peak memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measurement.layer_call import DeferWeightGradients, LayerCall, Selecting


@dataclass(frozen=True)
class SavedStorages:
    """Storages that one layer keeps: own bytes, and flags of boundary tensors in and out.

    ``conditioning_bytes`` are part of ``own_bytes``. ``passed`` marks outputs that are unchanged
    inputs.
    """

    own_bytes: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    conditioning_bytes: int
    passed: tuple[bool, ...]

    @property
    def recompute_bytes(self) -> int:
        """Bytes that recomputation creates and keeps, besides the inputs."""
        ends = zip(self.output_bytes, self.outputs, strict=True)
        made = self.own_bytes - self.conditioning_bytes
        return made + sum(n for n, keeps in ends if keeps)


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer, with bytes as in ``LayerTimes``.

    ``selective`` is kept under selective recomputation (None: unknown), with its own peak.
    """

    kept: SavedStorages
    peak_bytes: int
    forward_bytes: int
    wgrad_bytes: int
    selective: SavedStorages | None = None
    selective_peak_bytes: int = 0


class SavedStorageRecorder:
    """Context that collects the storages autograd keeps of a layer's forward.

    It calls ``noting`` for each tensor.
    """

    def __init__(self, call: LayerCall, noting: Callable[[], None] = lambda: None) -> None:
        self._call, self._noting = call, noting
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> None:
        """Add the storage of a kept tensor."""
        self._kept[_storage(tensor)] = tensor.untyped_storage().nbytes()

    def _pack(self, tensor: Tensor) -> Tensor:
        self._noting()
        self.add(tensor)
        return tensor.detach()

    def __enter__(self) -> SavedStorageRecorder:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)

    def count(self, outputs: Sequence[Tensor]) -> SavedStorages:
        """Storages kept so far; ``outputs`` are the boundary tensors that forward returned.

        See ``profile`` for the definition of a layer's own bytes.
        """
        call = self._call
        taken = [_storage(tensor) for tensor in call.boundary]
        returned = [_storage(tensor) for tensor in outputs]
        constant = (*call.module.parameters(), *call.module.buffers(), *call.shared)
        others = {_storage(tensor) for tensor in (*constant, *call.skips.values())}
        own = self._kept.keys() - others - set(taken) - set(returned)
        return SavedStorages(
            sum(self._kept[key] for key in own),
            tuple(key in self._kept for key in taken),
            tuple(key in self._kept and key not in taken and key not in others for key in returned),
            tuple(tensor.untyped_storage().nbytes() for tensor in call.boundary),
            tuple(tensor.untyped_storage().nbytes() for tensor in outputs),
            sum(self._kept[key] for key in own & set(map(_storage, call.conditioning.values()))),
            tuple(key in taken for key in returned),
        )


def saved_bytes(backbone: Backbone, kept: Sequence[SavedStorages]) -> list[int]:
    """``saved_bytes`` of every layer as ``profile`` defines them, from kept storages."""
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
def keeping_selected(call: LayerCall, selecting: Selecting) -> Iterator[SavedStorageRecorder]:
    """Run the layer's forward within this context, under selective recomputation.

    Kept tensors are recorded on exit, while the results still exist.
    """
    storages = SavedStorageRecorder(call)
    with selecting(call.module) as kept:
        yield storages
    for tensor in kept():
        storages.add(tensor)


def passed_bytes(kept: Sequence[SavedStorages]) -> list[int]:
    """Bytes of each layer's inputs that the previous layer took too and passed on."""
    before = [(), *(layer.passed for layer in kept[:-1])]
    return [
        sum(n for n, same in zip(layer.input_bytes, passed, strict=False) if same)
        for layer, passed in zip(kept, before, strict=True)
    ]


def memory_columns(backbone: Backbone, layers: Sequence[LayerMemory]) -> list[dict[str, int]]:
    """Memory fields of ``LayerTimes`` for each layer."""
    kept = [layer.kept for layer in layers]
    selected = [layer.selective for layer in layers if layer.selective is not None]
    selective = saved_bytes(backbone, selected) if len(selected) == len(kept) else [0] * len(kept)
    return [
        {
            "saved_bytes": saved,
            "peak_bytes": layer.peak_bytes,
            "recompute_bytes": layer.kept.recompute_bytes,
            "passed_bytes": passed,
            "forward_bytes": layer.forward_bytes,
            "wgrad_bytes": layer.wgrad_bytes,
            "selective_bytes": min(part, saved),
            "selective_peak_bytes": layer.selective_peak_bytes,
        }
        for layer, saved, passed, part in zip(
            layers, saved_bytes(backbone, kept), passed_bytes(kept), selective, strict=True
        )
    ]


def forward_bytes(call: LayerCall) -> int:
    """Peak bytes of a forward that keeps nothing, beyond its inputs."""
    live = LiveBytes()
    with live, torch.no_grad():
        call.forward()
    return live.peak


def wgrad_bytes(call: LayerCall, leaving: DeferWeightGradients) -> int:
    """Bytes held by deferred weight gradients after a backward of ``call``.

    Tensors of the batch are shared by all layers and not counted.
    """
    live = LiveBytes()
    with live:
        given = replace(
            call,
            boundary=tuple(tensor.clone() for tensor in call.boundary),
            skips={name: tensor.clone() for name, tensor in call.skips.items()},
            conditioning={
                name: tensor if any(tensor is one for one in call.shared) else tensor.clone()
                for name, tensor in call.conditioning.items()
            },
        )
        with leaving(call.module) as compute_left:
            results = given.forward()
        seeds = given.seeds(results)
        given.backward(results, seeds)
        del given, results, seeds
        held = live.held
    compute_left()  # deferred gradients must be computed to be released
    for parameter in call.trained:
        parameter.grad = None
    return held


@contextmanager
def live_bytes(call: LayerCall) -> Iterator[LiveBytes]:
    """Track the bytes of tensors that ``call`` creates.

    A parameter's gradient is released once complete, because it is then added to the sum over
    microbatches, which is not counted.
    """
    live = LiveBytes()
    hooks = [parameter.register_hook(live.let_go) for parameter in call.trained]
    try:
        with live:
            yield live
    finally:
        for hook in hooks:
            hook.remove()


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that tracks bytes of tensors created by operators: ``held`` now, ``peak`` at
    most.

    Works on meta tensors too. Kernel workspaces are not included.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given | self._alive.keys():
                storage = leaf.untyped_storage()
                self._alive[_storage(leaf)] = storage.nbytes()
                self.held += storage.nbytes()
                weakref.finalize(storage, self._gone, _storage(leaf))
        self.peak = max(self.peak, self.held)
        return result

    def let_go(self, tensor: Tensor) -> None:
        """Count ``tensor`` as freed."""
        self._gone(_storage(tensor))

    def _gone(self, storage: int) -> None:
        self.held -= self._alive.pop(storage, 0)


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, valid while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
