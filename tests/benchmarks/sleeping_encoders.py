"""Encoders whose layers sleep, run by the product's ``Encoding``: in idle time, or in front.

A state says which sample it is of and how many layers it has been through, so that whoever gets a
result can tell that every layer ran on it, once and in order; tensors are as large as emulated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States
from megatron_pulse.planner.bubble_fill.components import Component
from megatron_pulse.planner.schedule.operations import BubbleTask, Schedule
from megatron_pulse.runtime.encoding.encoding import Encoded as Results
from megatron_pulse.runtime.encoding.encoding import Encoding, FrozenComponent
from megatron_pulse.runtime.failure_board import default_board
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.tensor_settings import Batch
from tests.benchmarks.contestant import TIMEOUT_S, Encoders, Runner
from tests.runtime.emulated import sleep_until

LATE_S = 2e-3
"""A layer that begins so soon after another's end goes on with its time: calls take none."""


class Pace:
    """Sleeps one time after another; what passes between two is part of the second."""

    def __init__(self) -> None:
        self._until = 0.0

    def sleep(self, seconds: float) -> None:
        now = time.perf_counter()
        began = self._until if 0 <= now - self._until < LATE_S else now
        self._until = began + seconds
        sleep_until(self._until)


class Encoded:
    """The encoders of a contestant on one rank; those that are no ``bubble_tasks`` are in front.

    ``ran`` counts the layers that ran in this step by component, layer and sample, ``results`` are
    those of its end.
    """

    def __init__(
        self,
        encoders: Encoders,
        rank: int,
        links: Links | None,
        bubble_tasks: Sequence[BubbleTask] = (),
    ) -> None:
        self.ran: Counter[tuple[str, int, int]] = Counter()
        self.results: list[Results] = []
        self._rank, self._encoders, self._pace = rank, encoders, Pace()
        every = tuple(range(dist.get_world_size())) if links is not None else (rank,)
        homes = {f.name: f.devices or every for f in bubble_tasks}
        self._front = [c.name for c in encoders.components if c.name not in homes]
        self._are_filled = bool(bubble_tasks)
        found = [self._frozen(c, homes.get(c.name, every)) for c in encoders.components]
        self.encoding = Encoding(found, torch.device("cpu"), rank, links)
        self.batches: list[Batch] = [{"index": torch.arange(encoders.num_samples)}]
        if links is None:
            world = dist.get_world_size()
            self.batches = [{"index": torch.arange(rank, encoders.num_samples, world)}]

    def begin(self, schedule: Schedule | None = None) -> None:
        """Run the encoders before a step, then begin the step's bubble tasks."""
        self.ran.clear()
        self.results = []
        if self._front:
            self.results = self.encoding.front(self.batches, self._front)
        if self._are_filled:
            assert schedule is not None
            self.encoding.fill(schedule, self.batches)

    def end(self) -> None:
        """The step has ended: results are here."""
        if self._are_filled:
            front = self.results or [{} for _ in self.batches]
            filled = self.encoding.filled()
            self.results = [a | b for a, b in zip(front, filled, strict=True)]

    def _frozen(self, component: Component, homes: tuple[int, ...]) -> FrozenComponent:
        here = self._rank in homes
        pieces = tuple(
            EncoderPiece(layer.name, partial(self._layer, component, i))
            for i, layer in enumerate(component.layers)
        )
        return FrozenComponent(component.name, _given, ("result",), homes, pieces if here else None)

    def _layer(self, component: Component, number: int, states: States) -> States:
        state = states.get("state", states.get("sample"))
        assert state is not None
        sample, through = int(state[0, 0]), int(state[0, 1])
        if through != number:
            raise RuntimeError(f"{component.name}: layer {number} after {through} of {sample}")
        layer, last = component.layers[number], number + 1 == len(component.layers)
        self._pace.sleep(self._encoders.factor * layer.time_s(1))
        self.ran[component.name, number, sample] += 1
        size = component.result_bytes if last else layer.output_bytes
        return {"result" if last else "state": _state(sample, number + 1, size)}


def before_step(runner: Runner, encoders: Encoders, alone: bool) -> Runner:
    """``runner``'s step behind its encoders; each rank encodes ``alone`` what it reads, or all
    share the samples and tell each other. Collective."""
    links = None
    if not alone:
        assert dist.group.WORLD is not None
        links = Links(dist.group.WORLD, default_board(), TIMEOUT_S)
    encoded = Encoded(encoders, dist.get_rank(), links)

    def step() -> None:
        encoded.begin()
        runner.step()

    return Runner(step, runner.sent_bytes, runner.held_bytes)


def result_faults(encoded: Encoded, components: Sequence[Component]) -> list[str]:
    """Results that are not of their sample, or of all layers."""
    faults = []
    for component in components:
        for batch, results in zip(encoded.batches, encoded.results, strict=True):
            if component.name in results:
                found = results[component.name]["result"][:, :2]
                count = torch.full_like(batch["index"], len(component.layers))
                if not torch.equal(found, torch.stack([batch["index"], count], 1).float()):
                    faults.append(f"{component.name}: results are {found.tolist()}")
    return faults


def _given(batch: Batch, row: int) -> States:
    return {"sample": torch.tensor([[float(batch["index"][row]), 0.0]])}


def _state(sample: int, through: int, num_bytes: float) -> Tensor:
    made = torch.empty(1, max(2, round(num_bytes / 4)))
    made[0, 0], made[0, 1] = sample, through
    return made
