"""Measurement of one layer: times, memory, and a key of layers with equal measurements."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_pulse.profile.measurement.clock import RepetitionLimits, mean_and_spread, repeat
from megatron_pulse.profile.measurement.layer_call import (
    DeferWeightGradients,
    ExecutionModes,
    LayerCall,
)
from megatron_pulse.profile.measurement.memory import (
    LayerMemory,
    SavedStorageRecorder,
    forward_bytes,
    keeping_selected,
    live_bytes,
    wgrad_bytes,
)
from megatron_pulse.profile.profile import ProfileError

_BETWEEN_BYTES = 8 << 20
"""Bytes touched between two pieces of a layer on a CPU, more than a core's private caches."""


@dataclass(frozen=True)
class LayerMeasure:
    """Measurements of one layer at one microbatch size.

    Times are (forward, input gradient, weight gradient). ``split`` has them with deferred weight
    gradients (0: not measured). ``selective_s`` is the additional time of both passes under
    selective recomputation.
    """

    times: tuple[float, float, float]
    spreads: tuple[float, float, float]
    split: tuple[float, float, float]
    selective_s: float
    memory: LayerMemory

    @property
    def whole_s(self) -> float:
        """Forward and backward time."""
        return sum(self.times)


class OperatorTrace(TorchDispatchMode):
    """Digest of all operators with their arguments: shapes, strides, dtypes, and non-tensor values.

    Layers of equal digests run the same kernels on the same sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [
            (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in tree_leaves((args, kwargs, result))
        ]
        self._digest.update(f"{func} {leaves}\n".encode())
        return result

    def digest(self) -> str:
        """Digest of the operators so far."""
        return self._digest.hexdigest()


def measurement_key(call: LayerCall) -> str:
    """Key that is equal for calls with the same work in forward, backward and input gradient."""
    with OperatorTrace() as trace:
        results = call.forward()
        call.backward(results, call.seeds(results))
        with call.frozen():
            results = call.forward()
            call.input_gradients(results, call.seeds(results))
    sizes = [
        [tuple(t.shape) for t in tensors]
        for tensors in (call.boundary, call.skips.values(), call.conditioning.values(), results)
    ]
    parameters = [tuple(parameter.shape) for parameter in call.trained]
    return f"{trace.digest()} {sizes} {parameters}"


def measure_layer(
    call: LayerCall,
    num_outputs: int,
    device: torch.device,
    patience: RepetitionLimits,
    running: ExecutionModes | None,
) -> LayerMeasure:
    """Measure ``call`` on ``device`` for the duration of ``patience``.

    With ``running``, split backwards and selective recomputation are measured as well. Raises
    ProfileError if results differ from the layer's declaration.
    """
    with SavedStorageRecorder(call) as storages:
        results = call.forward()
    if misfit := call.result_mismatch(results):
        raise ProfileError(misfit)
    kept = storages.count(results[:num_outputs])
    seeds = call.seeds(results)
    del results
    rows = repeat(_work(call, seeds, device, running), device, patience)
    backward = [row[2] if call.inputs or call.trained else 0.0 for row in rows]
    if not call.inputs:
        input_grad = [0.0 for _ in rows]
    elif not call.trained:
        input_grad = backward
    else:
        input_grad = [row[4] for row in rows]
    weight_grad = [whole - part for whole, part in zip(backward, input_grad, strict=True)]
    forward = [row[0] for row in rows]
    times, spreads = zip(*map(mean_and_spread, (forward, input_grad, weight_grad)), strict=True)
    split, waiting, selective, most, more_s = (0.0, 0.0, 0.0), 0, None, 0, 0.0
    peak, alone = _peak_bytes(call, device), forward_bytes(call)
    if running is not None:
        waiting = wgrad_bytes(call, running.leaving)
        parts = [[row[i] for row in rows] for i in (-5, -3, -1)]
        split, _ = zip(*map(mean_and_spread, parts), strict=True)
        with keeping_selected(call, running.selecting) as storages:
            results = call.forward()
        selective = storages.count(results[:num_outputs])
        del results
        most = _peak_bytes(call, device, running.selecting)
        both = [row[-9] + row[-7] for row in rows]
        more_s = max(0.0, mean_and_spread(both)[0] - sum(times))
    memory = LayerMemory(kept, peak, alone, waiting, selective, most)
    return LayerMeasure(times, spreads, split, more_s, memory)


def _work(
    call: LayerCall,
    seeds: Sequence[Tensor | None],
    device: torch.device,
    running: ExecutionModes | None,
) -> Callable[[Callable[[], None]], None]:
    """Work whose pieces are timed by ``repeat``.

    Pieces alternate with filler writes between them:

    1. forward, then backward; 2. input gradient alone, if it is only a part of the backward; 3.
    with ``running``: forward and backward under selective recomputation; 4. with ``running``:
    forward and backward with deferred weight gradients, then these.

    A backward adds the parameters' gradients to earlier microbatches' sums in Megatron's dtype. As
    in a step, a CPU's caches hold other layers' tensors when a piece begins; warm caches would
    underestimate small layers.
    """
    sums = [
        torch.zeros_like(p, dtype=torch.float32 if p.dtype == torch.bfloat16 else p.dtype)
        for p in call.trained
    ]
    between = torch.zeros(_BETWEEN_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)

    def both_passes[T](
        mark: Callable[[], None], within: Callable[[Any], AbstractContextManager[T]]
    ) -> T:
        between.add_(1)
        mark()
        with within(call.module) as entered:
            results = call.forward()
        mark()
        between.add_(1)
        mark()
        _add_to(sums, call.backward(results, seeds))
        del results
        mark()
        return entered

    def work(mark: Callable[[], None]) -> None:
        both_passes(mark, _plainly)
        if call.inputs and call.trained:
            with call.frozen():
                results = call.forward()
                between.add_(1)
                mark()
                call.input_gradients(results, seeds)
                mark()
        if running is not None:
            both_passes(mark, running.selecting)
            split_work(mark, running.leaving)

    def split_work(mark: Callable[[], None], leaving: DeferWeightGradients) -> None:
        compute_left = both_passes(mark, leaving)
        between.add_(1)
        mark()
        compute_left()
        _add_to(sums, [parameter.grad for parameter in call.trained])
        mark()
        for parameter in call.trained:
            parameter.grad = None

    return work


def _add_to(sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient)


def _plainly(module: Any) -> AbstractContextManager[object]:
    return nullcontext()


def _peak_bytes(
    call: LayerCall,
    device: torch.device,
    within: Callable[[Any], AbstractContextManager[object]] = _plainly,
) -> int:
    if device.type != "cuda":
        with live_bytes(call) as live:
            with within(call.module):
                results = call.forward()
            call.backward(results, call.seeds(results))
        return live.peak
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before: int = torch.cuda.memory_allocated(device)
    with within(call.module):
        results = call.forward()
    call.backward_in_turn(results, call.seeds(results))
    peak: int = torch.cuda.max_memory_allocated(device)
    return peak - before
