"""A clock that work moves on."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.partitions.feasible import FeasiblePartitioner
from megatron_pulse.planner.tune.partitions.gradient_balance import GradientBalancer


class Clock:
    """A clock that only work moves: a millisecond at every look, and what ``works`` says."""

    def __init__(self) -> None:
        self.now = 0.0

    def works(self, monkeypatch: pytest.MonkeyPatch, slowness: float) -> None:
        """Simulating and cutting take time by their size."""
        evaluate, cheap = Evaluator.evaluate, GradientBalancer.quick_partitions
        own = FeasiblePartitioner.best

        def simulated(self_: Evaluator, config: Config, *args: Any, **more: Any) -> Outcome:
            self.now += slowness * 30e-6 * self_.size(config)
            return evaluate(self_, config, *args, **more)

        def cut(self_: GradientBalancer, config: Config, *limits: float) -> Any:
            self.now += slowness * 1e-4 * config.placement.num_stages**2
            return cheap(self_, config, *limits)

        def cut_well(self_: FeasiblePartitioner, config: Config) -> Any:
            self.now += slowness * 4e-4 * config.placement.num_stages**2
            return own(self_, config)

        monkeypatch.setattr(Evaluator, "evaluate", simulated)
        monkeypatch.setattr(GradientBalancer, "quick_partitions", cut)
        monkeypatch.setattr(FeasiblePartitioner, "best", cut_well)

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now
