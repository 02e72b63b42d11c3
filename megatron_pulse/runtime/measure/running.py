"""A layer alone as a stage runs it otherwise than plainly, for a profile to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_pulse.profile.measuring.layer_call import Running
from megatron_pulse.runtime.parameters.later import Later
from megatron_pulse.runtime.parameters.weight_gradients import deferring
from megatron_pulse.runtime.saved.selective import Selective


@contextmanager
def leaving_weights(module: Any) -> Iterator[Callable[[], None]]:
    """Within, a forward of ``module`` leaves the weight gradients that can wait, as a stage's does.

    Yields what computes them, after the backward, and adds them to the parameters' gradients.
    Megatron's linear layers leave theirs where ``wait_for_weight_gradients`` was called.
    """
    later = Later()
    with deferring(later, getattr(module, "undivided", ())):
        yield later.compute


@contextmanager
def selecting(module: Any) -> Iterator[Callable[[], Sequence[Tensor]]]:
    """Within, a forward of ``module`` saves nothing that is cheap to have again; yields what says
    what is kept, once it has run."""
    layer = Selective(type(module).__name__, module.parameters(), module.buffers())
    with layer.saving():
        yield lambda: layer.tensors


RUNNING = Running(leaving_weights, selecting)
