"""Bytes that layers keep from forward to backward, and the most that one has in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measuring.layer_call import LayerCall, LeavingWeights, Selecting


@dataclass(frozen=True)
class Kept:
    """What one layer keeps: bytes of its own, and which boundary tensors, in and out.

    ``conditioning_bytes`` of its own are conditioning, ``passed`` are the outputs that are inputs,
    as they came.
    """

    own_bytes: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    conditioning_bytes: int
    passed: tuple[bool, ...]

    @property
    def again_bytes(self) -> int:
        """What computing it again makes and keeps; what it was called with is there."""
        ends = zip(self.output_bytes, self.outputs, strict=True)
        made = self.own_bytes - self.conditioning_bytes
        return made + sum(n for n, keeps in ends if keeps)


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps, and the bytes that it has in use (as of ``LayerTimes``); ``selective``
    is what it keeps where what is cheap is computed again (None: not known), and then has in use at
    most."""

    kept: Kept
    peak_bytes: int
    forward_bytes: int
    waiting_bytes: int
    selective: Kept | None = None
    selective_peak_bytes: int = 0


class KeptStorages:
    """Within, collects the storages that autograd keeps of a layer's forward."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> None:
        """One more that is kept."""
        self._kept[_storage(tensor)] = tensor.untyped_storage().nbytes()

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
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
            sum(self._kept[key] for key in own & set(map(_storage, call.conditioning.values()))),
            tuple(key in taken for key in returned),
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
def keeping_selected(call: LayerCall, selecting: Selecting) -> Iterator[KeptStorages]:
    """Run the layer's forward within, as it saves nothing that is cheap; what is kept of it is
    there behind it, as long as its results are."""
    storages = KeptStorages(call)
    with selecting(call.module) as kept:
        yield storages
    for tensor in kept():
        storages.add(tensor)


def passed_bytes(kept: Sequence[Kept]) -> list[int]:
    """Of what each layer takes, what the one before was called with too, and handed on."""
    before = [(), *(layer.passed for layer in kept[:-1])]
    return [
        sum(n for n, same in zip(layer.input_bytes, passed, strict=False) if same)
        for layer, passed in zip(kept, before, strict=True)
    ]


def memory_columns(backbone: Backbone, layers: Sequence[LayerMemory]) -> list[dict[str, int]]:
    """Each layer's bytes as ``LayerTimes`` has them."""
    kept = [layer.kept for layer in layers]
    selected = [layer.selective for layer in layers if layer.selective is not None]
    selective = saved_bytes(backbone, selected) if len(selected) == len(kept) else [0] * len(kept)
    return [
        {
            "saved_bytes": saved,
            "peak_bytes": layer.peak_bytes,
            "again_bytes": layer.kept.again_bytes,
            "passed_bytes": passed,
            "forward_bytes": layer.forward_bytes,
            "waiting_bytes": layer.waiting_bytes,
            "selective_bytes": min(part, saved),
            "selective_peak_bytes": layer.selective_peak_bytes,
        }
        for layer, saved, passed, part in zip(
            layers, saved_bytes(backbone, kept), passed_bytes(kept), selective, strict=True
        )
    ]


def forward_bytes(call: LayerCall) -> int:
    """The most that is in use at once in a forward that keeps nothing, beyond its inputs."""
    live = LiveBytes()
    with live, torch.no_grad():
        call.forward()
    return live.peak


def waiting_bytes(call: LayerCall, leaving: LeavingWeights) -> int:
    """Bytes that the weight gradients hold which a backward of ``call`` has left.

    What comes with the batch is shared by all layers, and not counted.
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
    compute_left()  # what is left and never computed would be held for ever
    for parameter in call.trained:
        parameter.grad = None
    return held


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
    """Within, follows the bytes of the tensors that operators make: ``held`` now, ``peak`` at most.

    Works on tensors without memory too. What a kernel needs while it runs is not seen.
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
        """Count ``tensor`` as if it were gone."""
        self._gone(_storage(tensor))

    def _gone(self, storage: int) -> None:
        self.held -= self._alive.pop(storage, 0)


def _storage(tensor: Tensor) -> int:
    """What identifies a tensor's storage while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
