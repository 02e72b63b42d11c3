"""What benchmarks plan for: analytic profiles, clusters of like devices, the tuner's decision."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.search.result import Tuning as Tuning
from megatron_pulse.planner.tune.tune import UntunableError, tune
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import PRESETS, Roofline

USABLE = 0.9
"""Share of a device's memory that plans may use."""

V100 = Roofline(PRESETS["V100-32GB"], "float16")
"""The paper's device, in half precision."""

A100 = Roofline(PRESETS["A100-80GB"], "bfloat16")
RTX_4090 = Roofline(PRESETS["4090-24GB"], "bfloat16")
H200 = Roofline(PRESETS["H200"], "bfloat16")


def analytic(
    name: str,
    options: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (1,),
    device: Roofline = V100,
) -> Profile:
    """Analytic profile of a backbone at these microbatch sizes."""
    from megatron_pulse.profile.analytic import analyse
    from model_specs import load_backbone

    return analyse(load_backbone(name, options or {}), sizes, device)


def cluster_of(
    count: int, rate: float, memory_gb: float, device: str = "V100-32GB", **more: Any
) -> Cluster:
    """``count`` devices, each with a link of ``rate`` GB/s of its own."""
    link = ClusterLink("other", rate, 10.0, BandwidthScope.DEVICE)
    return Cluster("like", count, 1, memory_gb, device, link, link, usable_memory=USABLE, **more)


def decide(
    evaluator: Evaluator,
    choices: Choices,
    seconds: float,
    clock: Callable[[], float] = time.process_time,
    progress: Callable[[str, Tuning], None] = lambda what, found: None,
    fsdp: bool = False,
) -> Tuning | None:
    """Decision of ``pulse tune --no-fsdp`` (``fsdp``: without the flag) in so many seconds by
    ``clock``, without a solver or memory of earlier searches; None where nothing fits.

    The process's own time does not depend on what else runs.
    """
    with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, PULSE_CACHE_DIR=empty):
        try:
            choices = replace(choices, fsdp=fsdp)
            return tune(evaluator, choices, seconds, None, "none", 10, progress, clock)
        except UntunableError:
            return None
