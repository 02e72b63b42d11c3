"""Batches encoded in the loop: in the bubbles of the previous step, or before the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_pulse.integration.loop_encoders import DeviceEncoders
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.runtime.encoding.encoding import Encoded, Encoding
from megatron_pulse.runtime.tensor_settings import Batch


class EncodedBatches:
    """Encoded batches of one pipeline device.

    If bubble tasks encode the next batch meanwhile, a training step takes one batch more than it
    uses. The additional batch of the last step is not trained on. A continued run reads it again,
    and encodes its first batch before the step.
    """

    def __init__(self, encoders: DeviceEncoders, encoding: Encoding) -> None:
        self._encoders, self.encoding = encoders, encoding
        self._next: list[Batch] | None = None
        self._results: list[Encoded] = []
        self._filled: frozenset[str] = frozenset()

    def without_results(self) -> EncodedBatches:
        """New instance that has encoded nothing yet."""
        return EncodedBatches(self._encoders, self.encoding)

    def begin(
        self, batches: Iterator[Batch], schedule: Schedule, *, training: bool
    ) -> Iterator[Batch]:
        """Microbatches of a step that begins."""
        count = schedule.num_microbatches
        if not training:
            return iter(self._in_front(taken(batches, count), []))
        self._filled = frozenset(task.name for task in schedule.bubble_tasks)
        now = self._next if self._next is not None else taken(batches, count)
        ready = self._in_front(now, self._results if self._next is not None else [])
        self._next = None
        if self._filled:
            self._next = taken(batches, count)
            self.encoding.fill(schedule, self._next)
        return iter(ready)

    def not_finite(self) -> list[str]:
        """See ``DeviceEncoders``."""
        return self._encoders.not_finite()

    def end(self) -> None:
        """Take the results of the bubble tasks at the end of a training step."""
        if self._filled:
            self._results = self.encoding.filled()

    def _in_front(self, batches: Sequence[Batch], results: Sequence[Encoded]) -> list[Batch]:
        """``batches`` with encoder results; those not yet in ``results`` are computed now."""
        done = self._filled if results else frozenset()
        others = [c.name for c in self.encoding.components if c.name not in done]
        fresh = self.encoding.front(batches, others) if others else [{} for _ in batches]
        known = results or [{} for _ in batches]
        return [
            self._encoders.finished(batch, {**old, **new})
            for batch, old, new in zip(batches, known, fresh, strict=True)
        ]


class EncodedChains:
    """Encoded batches of one pipeline device of a cascade.

    Each chain's samples are encoded as in a run of its own, before the step.
    """

    def __init__(self, parts: Mapping[str, EncodedBatches]) -> None:
        self._parts = parts

    def without_results(self) -> EncodedChains:
        """New instance that has encoded nothing yet."""
        return EncodedChains({chain: part.without_results() for chain, part in self._parts.items()})

    def begin(
        self, batches: Iterator[Batch], schedule: Schedule, *, training: bool
    ) -> Iterator[Batch]:
        """Microbatches of a step that begins."""
        whole = taken(batches, schedule.num_microbatches)
        ready = {
            chain: part.begin(iter([_of(chain, b) for b in whole]), schedule, training=training)
            for chain, part in self._parts.items()
        }
        return iter(
            [
                {n: value for n, value in batch.items() if n.partition(".")[0] not in ready}
                | {f"{c}.{n}": v for c, own in ready.items() for n, v in next(own).items()}
                for batch in whole
            ]
        )

    def not_finite(self) -> list[str]:
        """See ``DeviceEncoders``."""
        parts = self._parts.items()
        return [f"{chain}: {fault}" for chain, part in parts for fault in part.not_finite()]

    def end(self) -> None:
        """Do nothing: a cascade has no bubble tasks."""


def _of(chain: str, batch: Batch) -> Batch:
    start = f"{chain}."
    return {n.removeprefix(start): v for n, v in batch.items() if n.startswith(start)}


def taken(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next ``count`` microbatches."""
    return [next(batches) for _ in range(count)]  # Megatron's iterators have only __next__
