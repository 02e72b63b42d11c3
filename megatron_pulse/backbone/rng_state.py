"""Contexts that restore the random generators of the process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def generators_kept(seed: int | None = None) -> Iterator[None]:
    """Seed all generators of the process with ``seed`` (None: leave them); restore them on exit."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            if seed is not None:
                random.seed(seed)
                torch.default_generator.manual_seed(
                    seed
                )  # torch.manual_seed would also reseed GPUs for good
                if gpus:
                    torch.cuda.manual_seed(seed)
                if numpy is not None:
                    numpy.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
