"""Predictions of a forward-only pass, returned to the first stage's device for sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.runtime.tensor_settings import META, Batch


class ReturnedPredictions:
    """Carrier of the predictions of one pass on one pipeline device, in fp32.

    The first stage's device has all of them after the pass. The last stage's device drops those
    that it has sent.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._shape = backbone.output_spec.shape
        self._batches: Sequence[Batch] = ()
        self._found: dict[int, Tensor] = {}
        self._num_made = 0

    def of(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Batches of a pass that begins."""
        self._batches, self._found, self._num_made = batches, {}, 0
        return iter(batches)

    def keep(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Store a prediction; used in place of a loss. A stage processes microbatches in order."""
        self._found[self._num_made] = prediction.float()
        self._num_made += 1
        return prediction.new_zeros(())

    def taken(self) -> list[Tensor]:
        """Predictions of the pass, in the order of the microbatches; empty on other devices."""
        found, self._found, self._batches = self._found, {}, ()
        return [found[microbatch] for microbatch in sorted(found)]

    def outgoing(self, message: Message) -> Tensor:
        """Prediction of the microbatch."""
        return self._found.pop(message.producer.microbatch)

    def like(self, message: Message) -> Tensor:
        """Meta tensor of a prediction received from the last stage's device."""
        size = len(self._batches[message.producer.microbatch]["timesteps"])
        return torch.empty((size, *self._shape), dtype=torch.float32, device=META)

    def take(self, message: Message, tensor: Tensor) -> None:
        """Store a prediction received from the last stage's device."""
        self._found[message.producer.microbatch] = tensor
