"""A layer alone as split backwards run it, for a profile to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pulse.runtime.parameters.later import Later
from megatron_pulse.runtime.parameters.weight_gradients import deferring


@contextmanager
def leaving_weights(module: Any) -> Iterator[Callable[[], None]]:
    """Within, a forward of ``module`` leaves the weight gradients that can wait, as a stage's does.

    Yields what computes them, after the backward, and adds them to the parameters' gradients.
    Megatron's linear layers leave theirs where ``wait_for_weight_gradients`` was called.
    """
    later = Later()
    with deferring(later, getattr(module, "undivided", ())):
        yield later.compute
