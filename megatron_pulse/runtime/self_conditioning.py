"""Self-conditioning: predictions of a first pass, concatenated to the samples of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.diffusion.self_conditioning import beside, conditions_itself
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.runtime.tensor_settings import META, Batch, LossFunction, RunSettings


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


class PredictionCarrier:
    """Carrier of the predicting pass on one pipeline device.

    ``estimate(prediction, batch)`` converts a prediction into the first layer's extra input, in the
    sample's shape. The estimate is stored in this layer's dtype on every device, so that results do
    not depend on the layout.
    """

    def __init__(self, backbone: Backbone, estimate: LossFunction, settings: RunSettings) -> None:
        self._estimate = estimate
        self._dtype = settings.dtype_of(backbone.input_spec)
        self._batches: Sequence[Batch] = ()
        self._num_made = 0
        self._found: dict[int, Tensor] = {}

    def of(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Batches of the predicting pass; estimates of the previous step are dropped."""
        self._batches = batches
        self._num_made, self._found = 0, {}
        return map(joined, batches)

    def keep(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Store an estimate; used in place of a loss. A stage processes microbatches in order."""
        self._found[self._num_made] = self._estimate(prediction, batch).to(self._dtype)
        self._num_made += 1
        return prediction.new_zeros(())

    def joined(self) -> Iterator[Batch]:
        """Batches of the training pass."""
        for microbatch, batch in enumerate(self._batches):
            yield joined(batch, self._found.pop(microbatch, None))

    def outgoing(self, message: Message) -> Tensor:
        """Estimate of the microbatch, computed by the last stage."""
        return self._found.pop(message.producer.microbatch)

    def like(self, message: Message) -> Tensor:
        """Meta tensor of an estimate received from the last stage's device."""
        noisy = self._batches[message.producer.microbatch]["noisy"]
        return torch.empty(noisy.shape, dtype=self._dtype, device=META)

    def take(self, message: Message, tensor: Tensor) -> None:
        """Store an estimate received from the last stage's device."""
        self._found[message.producer.microbatch] = tensor


def joined(batch: Batch, estimate: Tensor | None = None) -> Batch:
    """Concatenate ``estimate`` (None: zeros) to the samples of ``batch``, if it has samples."""
    if "noisy" not in batch:
        return batch
    return {**batch, "noisy": beside(batch["noisy"], estimate)}
