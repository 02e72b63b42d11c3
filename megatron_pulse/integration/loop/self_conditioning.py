"""Which steps of a run give the backbone what it has predicted itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pulse.diffusion.self_conditioning import conditions_itself
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.runtime.settings import LossFunction


@dataclass(frozen=True)
class SelfConditioning:
    """``share`` of the steps, by their numbers from 0, which ``step`` gives for the one that runs.

    ``estimate`` is what the first layer sees of a prediction for a microbatch.
    """

    share: float
    seed: int
    step: Callable[[], int]
    estimate: LossFunction

    @property
    def is_now(self) -> bool:
        """Whether the step that runs does; all its microbatches are alike, on every rank."""
        return conditions_itself(self.share, self.seed, self.step())

    def describe(self, placement: Placement) -> str:
        """For people: how often, and where predictions travel."""
        last, first = placement.device_of_stage[-1], placement.device_of_stage[0]
        where = f"are sent from device {last} to device {first}"
        if last == first:
            where = f"stay on device {first}"
        return (
            f"self-conditioning: {100 * self.share:g} % of the steps run forward once before, and "
            f"predictions {where}"
        )
