"""Selection of the steps in which the backbone is given its own prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pulse.diffusion.self_conditioning import conditions_itself
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.runtime.tensor_settings import LossFunction


@dataclass(frozen=True)
class SelfConditioning:
    """Self-conditioning of a ``share`` of the steps; ``step`` returns the current step, from 0.

    ``estimate`` computes the first layer's additional input from a prediction for a microbatch.
    """

    share: float
    seed: int
    step: Callable[[], int]
    estimate: LossFunction

    @property
    def is_now(self) -> bool:
        """True if the current step is self-conditioned, the same on all ranks."""
        return conditions_itself(self.share, self.seed, self.step())

    def describe(self, placement: Placement) -> str:
        """Line on the share of steps and on the way of the predictions."""
        last, first = placement.device_of_stage[-1], placement.device_of_stage[0]
        where = f"are sent from device {last} to device {first}"
        if last == first:
            where = f"stay on device {first}"
        return (
            f"self-conditioning: {100 * self.share:g} % of the steps run a first forward pass; "
            f"predictions {where}"
        )
