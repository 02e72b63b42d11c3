"""Encoding of samples by frozen components, in bubbles of the previous step or before the step.

::

    step n      F0 X0:0 F0  X0:1  B0 ... | results to their consumers
    step n + 1  F0 ...                     consumes them; X0:0 encodes for step n + 2

Components process one sample at a time, whatever the slice. Results depend bitwise on the number of
samples encoded together, and must be equal for bubble filling, encoding before steps, and stored
encodings. Batches of a run's first step, and of evaluation, are encoded before the step. Each home
of a component then encodes a share of the samples and broadcasts the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.errors import format_faults, unknown_name
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import BubbleTask, OpType, Schedule
from megatron_pulse.runtime.encoding.packing import PackedLayout, pack, packed_bytes, unpack
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.tensor_settings import META, Batch

type _Shape = tuple[int, ...]
type Encoded = dict[str, dict[str, Tensor]]
"""States ``[b, ...]`` of a microbatch's samples, by component and name."""


@dataclass(frozen=True)
class FrozenComponent:
    """A frozen component on a device.

    ``given`` maps a microbatch and a row to the layers' inputs for this sample, with a batch
    dimension of one, on the compute device. ``results`` names the states used after the last layer.
    ``homes`` are the devices that hold the layers; elsewhere ``pieces`` is None.
    """

    name: str
    given: Callable[[Batch, int], States]
    results: tuple[str, ...]
    homes: tuple[int, ...]
    pieces: tuple[EncoderPiece, ...] | None


@dataclass(frozen=True)
class _Sizes:
    """Layouts of one sample's states after each layer, and of the component's results.

    ``kept[i]`` names the inputs of the component still needed after layer i.
    """

    layers: tuple[PackedLayout, ...]
    kept: tuple[tuple[str, ...], ...]
    results: PackedLayout


class Encoding:
    """Encodes the batches of one pipeline device. Calls are collective over the pipeline.

    ``device`` computes, ``number`` is the pipeline device, ``links`` connect the others (None:
    there are none).
    """

    def __init__(
        self,
        components: Sequence[FrozenComponent],
        device: torch.device,
        number: int = 0,
        links: Links | None = None,
    ) -> None:
        self.components = tuple(components)
        self._device, self._number, self._links = device, number, links
        self._sizes: dict[tuple[str, _Shape], _Sizes] = {}
        self._bubble_tasks: tuple[BubbleTask, ...] = ()
        self._batches: tuple[Batch, ...] = ()
        self._samples: list[tuple[Batch, int]] = []
        self._states: dict[tuple[str, int], States] = {}
        self._results: dict[tuple[str, int], States] = {}

    def front(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> list[Encoded]:
        """Encode all microbatches with components ``names`` (None: all); results on all devices."""
        samples = _rows(batches)
        self._learn(batches)
        found: dict[tuple[str, int], States] = {}
        encoding = [c for c in self.components if names is None or c.name in names]
        shares = [
            (component, home, range(n, len(samples), len(component.homes)))
            for component in encoding
            for n, home in enumerate(component.homes)
        ]
        for component, home, share in shares:
            for sample in share if home == self._number else ():
                found[component.name, sample] = self._whole(component, *samples[sample])
        for component, home, share in shares if self._links is not None else ():
            self._tell(component, home, share, samples, found)
        return _by_microbatch(batches, encoding, found)

    def _whole(self, component: FrozenComponent, batch: Batch, row: int) -> States:
        assert component.pieces is not None
        states = run_pieces(component.pieces, component.given(batch, row))
        return {name: states[name] for name in component.results}

    def _tell(
        self,
        component: FrozenComponent,
        home: int,
        share: Sequence[int],
        samples: Sequence[tuple[Batch, int]],
        found: dict[tuple[str, int], States],
    ) -> None:
        """Broadcast the results that ``home`` has encoded."""
        assert self._links is not None
        if not len(share):
            return
        layouts = [self._sizes[component.name, _shape(samples[s][0])].results for s in share]
        if home == self._number:
            buffer = pack(layouts, [found[component.name, s] for s in share], self._device)
        else:
            buffer = torch.empty(packed_bytes(layouts), dtype=torch.uint8, device=self._device)
        self._links.broadcast(buffer, home, f"results of {component.name}")
        for sample, states in zip(share, unpack(layouts, buffer), strict=True):
            found[component.name, sample] = states

    def _learn(self, batches: Sequence[Batch]) -> None:
        """Determine layouts of states by shape; a component's first home measures them."""
        first: dict[_Shape, Batch] = {}
        for batch in batches:
            first.setdefault(_shape(batch), batch)
        for component, (shape, batch) in product(self.components, first.items()):
            if (component.name, shape) in self._sizes:
                continue
            sizes: _Sizes | None = None
            if component.homes[0] == self._number:
                sizes = _measured(component, batch)
            if self._links is not None:
                what = f"the sizes of {component.name}"
                sizes = self._links.broadcast_object(sizes, component.homes[0], what)
            assert sizes is not None
            self._sizes[component.name, shape] = sizes

    def fill(self, schedule: Schedule, batches: Sequence[Batch]) -> None:
        """Assign ``batches`` to the bubble tasks of ``schedule``; PulseError if they do not fit."""
        samples = _rows(batches)
        if faults := list(self._bubble_task_faults(schedule, len(samples))):
            raise PulseError(format_faults("the plan's bubble tasks", faults))
        self._learn(batches)
        self._bubble_tasks, self._batches, self._samples = (
            schedule.bubble_tasks,
            tuple(batches),
            samples,
        )
        self._states.clear()
        self._results.clear()

    def workloads(self, schedule: Schedule) -> list[Callable[[int], None]]:
        """Callables of the schedule's bubble tasks."""
        return [self._workload(number) for number in range(len(schedule.bubble_tasks))]

    def filled(self) -> list[Encoded]:
        """Results that this device consumes, for every microbatch; call when the step has ended."""
        batches, found = self._batches, dict(self._results)
        read = [self._component(f.name) for f in self._bubble_tasks if self._number in f.consumers]
        self._batches, self._samples = (), []
        self._states.clear()
        self._results.clear()
        return _by_microbatch(batches, read, found)

    def _workload(self, number: int) -> Callable[[int], None]:
        def work(slice_: int) -> None:
            task = self._bubble_tasks[number]
            component = self._component(task.name)
            assert component.pieces is not None  # checked in fill
            first, last, one, end = task.slices[slice_]
            for sample in range(one, end):
                if first:
                    states = self._states.pop((task.name, sample))
                else:
                    states = component.given(*self._samples[sample])
                states = run_pieces(component.pieces[first:last], states)
                if last < len(component.pieces):
                    self._states[task.name, sample] = states
                else:
                    kept = {name: states[name] for name in component.results}
                    self._results[task.name, sample] = kept

        return work

    def outgoing(self, message: Message) -> Tensor:
        """States that a slice leaves, packed as bytes."""
        name, samples, layouts = self._content(message)
        if message.consumer == STEP_END:
            return pack(layouts, [self._results[name, s] for s in samples], self._device)
        found = [self._states.pop((name, sample)) for sample in samples]
        return pack(layouts, found, self._device, self._kept(message))

    def like(self, message: Message) -> Tensor:
        """Meta tensor of a message from another device's slice."""
        _, _, layouts = self._content(message)
        return torch.empty(packed_bytes(layouts), dtype=torch.uint8, device=META)

    def take(self, message: Message, tensor: Tensor) -> None:
        """Store the states received from another device's slice."""
        name, samples, layouts = self._content(message)
        states = unpack(layouts, tensor)
        if message.consumer == STEP_END:
            self._results |= {(name, s): one for s, one in zip(samples, states, strict=True)}
            return
        kept = self._kept(message)
        for sample, one in zip(samples, states, strict=True):
            if kept:
                given = self._component(name).given(*self._samples[sample])
                one |= {key: given[key] for key in kept}
            self._states[name, sample] = one

    def _kept(self, message: Message) -> tuple[str, ...]:
        """Names of component inputs that later layers need; every device has these inputs."""
        task = self._bubble_tasks[message.producer.stage]
        _, last, one, _ = task.slices[message.producer.microbatch]
        return self._sizes_of(task.name, one).kept[last - 1]

    def _content(self, message: Message) -> tuple[str, range, list[PackedLayout]]:
        """Component, samples, and the layout of each, of a message."""
        task = self._bubble_tasks[message.producer.stage]
        _, last, one, end = task.slices[message.producer.microbatch]
        if message.consumer == STEP_END:
            samples = range(one, end)
            return task.name, samples, [self._sizes_of(task.name, s).results for s in samples]
        _, _, first, after = task.slices[message.consumer.microbatch]
        samples = range(max(one, first), min(end, after))
        return task.name, samples, [self._sizes_of(task.name, s).layers[last - 1] for s in samples]

    def _sizes_of(self, name: str, sample: int) -> _Sizes:
        return self._sizes[name, _shape(self._samples[sample][0])]

    def _component(self, name: str) -> FrozenComponent:
        return next(c for c in self.components if c.name == name)

    def _bubble_task_faults(self, schedule: Schedule, num_samples: int) -> Iterator[str]:
        """Mismatches between the schedule's bubble tasks and these components or samples."""
        names = [component.name for component in self.components]
        for number, task in enumerate(schedule.bubble_tasks):
            if task.name not in names:
                yield unknown_name("component", task.name, names)
                continue
            component = self._component(task.name)
            pieces = component.pieces
            if not task.slices:
                yield f"{task.name}: its slices do not name their layers and samples"
                continue
            if pieces is not None and (last := max(p[1] for p in task.slices)) != len(pieces):
                yield f"{task.name} has {len(pieces)} layers, the plan's has {last}"
            if (last := max(p[3] for p in task.slices)) != num_samples:
                yield (
                    f"{task.name} encodes {last} samples; a step of each pipeline has {num_samples}"
                )
            if any(dep.task != number for deps in task.deps for dep in deps):
                yield (
                    f"{task.name} waits for results of another component; no component here does"
                )
            own = schedule.order[self._number]
            if pieces is None and any(
                op.kind is OpType.BUBBLE_TASK and op.stage == number for op in own
            ):
                yield f"{task.name} runs on device {self._number}, which has no copy of it"


def _shape(batch: Batch) -> _Shape:
    """Shape of a microbatch's samples, which every device knows; empty if all have one shape."""
    return tuple(batch["noisy"].shape[1:]) if "noisy" in batch else ()


def _measured(component: FrozenComponent, batch: Batch) -> _Sizes:
    """Run one sample layer by layer to measure its layouts."""
    assert component.pieces is not None
    given = states = component.given(batch, 0)
    layers, kept = [], []
    for piece in component.pieces:
        states = run_pieces((piece,), states)
        layers.append(PackedLayout.of({k: v for k, v in states.items() if v is not given.get(k)}))
        kept.append(tuple(k for k, v in states.items() if v is given.get(k)))
    results = PackedLayout.of({name: states[name] for name in component.results})
    return _Sizes(tuple(layers), tuple(kept), results)


def _rows(batches: Sequence[Batch]) -> list[tuple[Batch, int]]:
    """All samples of a step as pairs of microbatch and row."""
    return [(batch, row) for batch in batches for row in range(len(batch["index"]))]


def _by_microbatch(
    batches: Sequence[Batch],
    components: Sequence[FrozenComponent],
    found: Mapping[tuple[str, int], States],
) -> list[Encoded]:
    """Concatenate states of samples along each microbatch."""
    joined, first = [], 0
    for batch in batches:
        samples = range(first, first + len(batch["index"]))
        first = samples.stop
        joined.append(
            {
                c.name: {
                    name: torch.cat([found[c.name, s][name] for s in samples]) for name in c.results
                }
                for c in components
            }
        )
    return joined
