"""What ``pulse tune`` decides, as benchmarks ask it: without a solver, knowing nothing before."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from unittest.mock import patch

from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.search.budget import Clock
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.tune import UntunableError, tune


def decide(
    evaluator: Evaluator,
    choices: Choices,
    seconds: float,
    clock: Clock = time.process_time,
    progress: Callable[[str, Tuning], None] = lambda what, found: None,
) -> Tuning | None:
    """What is found in so many seconds by ``clock``, which of the process's time do not depend on
    what else runs; whole schedules are in them. None where nothing fits."""
    with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, PULSE_CACHE_DIR=empty):
        try:
            return tune(evaluator, choices, seconds, None, "none", 10, progress, clock)
        except UntunableError:
            return None
