"""Import of Megatron without its warnings about optional packages."""

from __future__ import annotations

import os
import warnings

from megatron_pulse.cli.flag_checks import as_user_error
from megatron_pulse.processes import without_collecting


def prepare_megatron() -> None:
    """Make Megatron importable; call before any import of it."""
    os.environ.setdefault("WANDB_MODE", "disabled")
    warnings.filterwarnings("ignore")
    with without_collecting():
        from megatron_pulse.integration.megatron import compat

        with as_user_error(compat.UnsupportedMegatron):
            compat.install()


def prepare_profiling() -> None:
    """Prepare Megatron, and let its linear layers defer weight gradients, as in a run."""
    prepare_megatron()
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    defer_wgrad()
