"""Re-timing of a simulated schedule for other cuts, with the order of operations kept.

A simulation searches a schedule and computes its bound and memory. For cuts that differ by a few
layers the order can stay; only durations and messages change. Replaying the order takes a tenth of
the time or less. It ranks moved cuts about as their own simulations do, and better than estimates.
Memory is not checked.
"""

from __future__ import annotations

import numpy as np

from megatron_pulse.planner.program.simulate import play_messages
from megatron_pulse.planner.schedule.check.simulate import StepSimulator
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, completing
from megatron_pulse.planner.tune.stages import Stages


class FixedOrder:
    """Step times of the outcome's config with other cuts.

    Microbatches that are not simulated add time in proportion to the busiest device.
    """

    def __init__(self, evaluator: Evaluator, outcome: Outcome) -> None:
        self.evaluator, self.outcome = evaluator, outcome
        timeline, stages = outcome.timeline, outcome.stages
        self._player = StepSimulator(timeline.schedule)
        number = {op: i for i, op in enumerate(self._player.every)}
        self._completing = [
            (stage, number[op]) for stage, op in completing(timeline.schedule).items()
        ]
        more_s = outcome.pipeline_s - stages.embedder_copy_s - timeline.makespan
        self._more = more_s / max(timeline.busy)

    def step_s(self, stages: Stages) -> float:
        """Seconds of a step; infinite if the order is infeasible."""
        evaluator, outcome = self.evaluator, self.outcome
        config, player = outcome.config, self._player
        count = outcome.problem.num_microbatches
        problem = evaluator.stages.problem(config, count, stages, anyhow=True)
        start, end, seconds, _ = play_messages(player, problem, stages.edges)
        if np.isnan(end).any():
            return float("inf")
        makespan = float(end.max())
        busy = float(np.add.reduceat(seconds, player.first[:-1]).max())
        last = {stage: (float(start[i]), float(end[i])) for stage, i in self._completing}
        pipeline_s = makespan + stages.embedder_copy_s + self._more * busy
        reduce_s = evaluator.exposed_reduction(config, stages, last, makespan)
        held = stages.per_device(stages.trained)
        optimizer_s = evaluator.estimator.optimizer_of_devices(config, held)
        return pipeline_s + reduce_s + optimizer_s + outcome.first_pass_s
