"""What a backbone made of the microbatches of a step, behind their samples as its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.diffusion.self_conditioning import beside
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.runtime.settings import META, Batch, LossFunction, RunSettings


class Predictions:
    """The carrier of a pass that predicts, on one pipeline device.

    ``estimate(prediction, batch)`` is what the first layer is to see of a prediction, of the
    sample's shape. It is kept in the dtype that this layer takes, wherever it was made, so that it
    is the same in every layout.
    """

    def __init__(self, backbone: Backbone, estimate: LossFunction, settings: RunSettings) -> None:
        self._estimate = estimate
        self._dtype = settings.dtype_of(backbone.input_spec)
        self._batches: Sequence[Batch] = ()
        self._num_made = 0
        self._found: dict[int, Tensor] = {}

    def of(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """``batches`` for the pass that predicts; what the step before left is let go."""
        self._batches = batches
        self._num_made, self._found = 0, {}
        return map(joined, batches)

    def keep(self, prediction: Tensor, batch: Batch) -> Tensor:
        """In the place of a loss: a stage works through the microbatches in order."""
        self._found[self._num_made] = self._estimate(prediction, batch).to(self._dtype)
        self._num_made += 1
        return prediction.new_zeros(())

    def joined(self) -> Iterator[Batch]:
        """The batches for the pass that trains."""
        for microbatch, batch in enumerate(self._batches):
            yield joined(batch, self._found.pop(microbatch, None))

    def outgoing(self, message: Message) -> Tensor:
        """What the last stage has made of a microbatch."""
        return self._found.pop(message.producer.microbatch)

    def like(self, message: Message) -> Tensor:
        """A tensor without memory, like what the last stage of another device makes of a
        microbatch."""
        noisy = self._batches[message.producer.microbatch]["noisy"]
        return torch.empty(noisy.shape, dtype=self._dtype, device=META)

    def take(self, message: Message, tensor: Tensor) -> None:
        """What the last stage of another device has made of a microbatch."""
        self._found[message.producer.microbatch] = tensor


def joined(batch: Batch, estimate: Tensor | None = None) -> Batch:
    """``batch`` with ``estimate`` behind its samples (None: zeros), where it has samples."""
    if "noisy" not in batch:
        return batch
    return {**batch, "noisy": beside(batch["noisy"], estimate)}
