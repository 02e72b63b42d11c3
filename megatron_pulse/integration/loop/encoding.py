"""Batches of a run that encodes its samples: in the idle time of the step before, or in front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_pulse.integration.encoding import Encoders
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.runtime.encoding.encoding import Encoded, Encoding
from megatron_pulse.runtime.settings import Batch


class EncodedBatches:
    """What the steps of one pipeline device are given.

    A step of training takes one batch more than it uses where ``fillers`` encode the next one
    meanwhile. That is not trained on if the run ends there: a run that goes on reads it again, and
    encodes its first batch in front.
    """

    def __init__(self, encoders: Encoders, encoding: Encoding) -> None:
        self._encoders, self.encoding = encoders, encoding
        self._next: list[Batch] | None = None
        self._results: list[Encoded] = []
        self._filled: frozenset[str] = frozenset()

    def anew(self) -> EncodedBatches:
        """One that has encoded nothing yet."""
        return EncodedBatches(self._encoders, self.encoding)

    def begin(
        self, batches: Iterator[Batch], schedule: Schedule, *, training: bool
    ) -> Iterator[Batch]:
        """The microbatches of a step that begins."""
        count = schedule.num_microbatches
        if not training:
            return iter(self._in_front(taken(batches, count), []))
        self._filled = frozenset(filler.name for filler in schedule.fillers)
        now = self._next if self._next is not None else taken(batches, count)
        ready = self._in_front(now, self._results if self._next is not None else [])
        self._next = None
        if self._filled:
            self._next = taken(batches, count)
            self.encoding.fill(schedule, self._next)
        return iter(ready)

    def not_finite(self) -> list[str]:
        """See ``Encoders``."""
        return self._encoders.not_finite()

    def end(self) -> None:
        """The step of training has ended."""
        if self._filled:
            self._results = self.encoding.filled()

    def _in_front(self, batches: Sequence[Batch], results: Sequence[Encoded]) -> list[Batch]:
        """``batches`` with results, of which some may be there."""
        done = self._filled if results else frozenset()
        others = [c.name for c in self.encoding.components if c.name not in done]
        fresh = self.encoding.front(batches, others) if others else [{} for _ in batches]
        known = results or [{} for _ in batches]
        return [
            self._encoders.finished(batch, {**old, **new})
            for batch, old, new in zip(batches, known, fresh, strict=True)
        ]


class EncodedChains:
    """What the steps of one pipeline device of a cascade are given: each chain's samples as in a
    run of its own, in front of the step."""

    def __init__(self, parts: Mapping[str, EncodedBatches]) -> None:
        self._parts = parts

    def anew(self) -> EncodedChains:
        """One that has encoded nothing yet."""
        return EncodedChains({chain: part.anew() for chain, part in self._parts.items()})

    def begin(
        self, batches: Iterator[Batch], schedule: Schedule, *, training: bool
    ) -> Iterator[Batch]:
        """The microbatches of a step that begins."""
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
        """See ``Encoders``."""
        parts = self._parts.items()
        return [f"{chain}: {fault}" for chain, part in parts for fault in part.not_finite()]

    def end(self) -> None:
        """The step of training has ended."""


def _of(chain: str, batch: Batch) -> Batch:
    start = f"{chain}."
    return {n.removeprefix(start): v for n, v in batch.items() if n.startswith(start)}


def taken(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next ``count`` microbatches."""
    return [next(batches) for _ in range(count)]  # Megatron's iterators have nothing but next
