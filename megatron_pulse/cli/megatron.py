"""Megatron, imported without the dozen warnings about what a laptop does not have."""

from __future__ import annotations

import logging
import os
import warnings

from megatron_pulse.cli.errors import mending
from megatron_pulse.processes import without_collecting


def prepare_megatron() -> None:
    """Make Megatron importable here; call before whatever imports it."""
    os.environ.setdefault("WANDB_MODE", "disabled")
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with without_collecting():
        from megatron_pulse.integration.megatron import compat

        with mending(compat.UnsupportedMegatron):
            compat.install()


def prepare_profiling() -> None:
    """The same, and let weight gradients of Megatron's linear layers wait, as they do in a run."""
    prepare_megatron()
    from megatron_pulse.integration.megatron.linear import wait_for_weight_gradients

    wait_for_weight_gradients()
