"""What a step takes by other cuts, if devices work in the order of one that was simulated.

A simulation makes a schedule, its bound, and what that takes of memory. For cuts that differ by
some layers the order can stay, and only times and messages be others: playing these takes a tenth
of the time or less (of 256 operations 0.5 ms for 6, of 4,096 3.3 for 81, the cuts' own costs
included) and ranks moved cuts about as their simulations do
(0.91, where estimates do to 0.61: SD v2 4.6B over 8 devices at 100 Gb/s). Memory is not looked at.
"""

from __future__ import annotations

import numpy as np

from megatron_pulse.planner.step.replay import Player
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, completing
from megatron_pulse.planner.tune.stages import Stages


class InOrder:
    """Steps of the outcome's config by other cuts.

    What microbatches that are not simulated add, it adds per second of the busiest device too.
    """

    def __init__(self, evaluator: Evaluator, outcome: Outcome) -> None:
        self.evaluator, self.outcome = evaluator, outcome
        timeline, stages = outcome.timeline, outcome.stages
        self._player = Player(timeline.schedule)
        number = {op: i for i, op in enumerate(self._player.every)}
        self._completing = [
            (stage, number[op]) for stage, op in completing(timeline.schedule).items()
        ]
        more_s = outcome.pipeline_s - stages.copying_s - timeline.makespan
        self._more = more_s / max(timeline.busy)

    def step_s(self, stages: Stages) -> float:
        """Seconds of a step; infinite where the order cannot be kept."""
        evaluator, outcome = self.evaluator, self.outcome
        config, player = outcome.config, self._player
        count = outcome.problem.num_microbatches
        problem = evaluator.problem_of(config, count, stages, anyhow=True)
        (start, end, *_), seconds = player.play(problem, stages.edges)
        if np.isnan(end).any():
            return float("inf")
        makespan = float(end.max())
        busy = float(np.add.reduceat(seconds, player.first[:-1]).max())
        last = {stage: (float(start[i]), float(end[i])) for stage, i in self._completing}
        pipeline_s = makespan + stages.copying_s + self._more * busy
        reduce_s = evaluator.exposed_reduction(config, stages, last, makespan)
        held = max(stages.per_device(stages.trained))
        own_s = outcome.self_conditioning_s
        return pipeline_s + reduce_s + evaluator.optimizer_s(config, held) + own_s
