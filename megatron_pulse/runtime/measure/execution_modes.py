"""Execution modes of a single layer, for a profile: deferred weight gradients, selective
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_pulse.profile.measurement.layer_call import ExecutionModes
from megatron_pulse.runtime.activations.selective_recompute import SelectiveRecompute
from megatron_pulse.runtime.parameters.split_backward import deferring
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore


@contextmanager
def leaving_weights(module: Any) -> Iterator[Callable[[], None]]:
    """Defer weight gradients of ``module``'s forward, as a stage does.

    Yields a function that computes and accumulates the deferred gradients; call it after backward.
    Megatron's linear layers defer if ``defer_wgrad`` was called.
    """
    wgrad_store = WeightGradStore()
    with deferring(wgrad_store, getattr(module, "undivided", ())):
        yield wgrad_store.compute


@contextmanager
def selecting(module: Any) -> Iterator[Callable[[], Sequence[Tensor]]]:
    """Run ``module``'s forward with selective recomputation.

    Yields a function that returns the tensors kept, once forward has run.
    """
    layer = SelectiveRecompute(type(module).__name__, module.parameters(), module.buffers())
    with layer.saving():
        yield lambda: layer.tensors


RUNNING = ExecutionModes(leaving_weights, selecting)
