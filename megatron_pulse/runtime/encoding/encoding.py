"""Frozen components that encode the samples of steps: in idle time of the step before, or in front.

::

    step n      F0 X0:0 F0  X0:1  B0 ... | results to who reads them
    step n + 1  F0 ...                     reads them; X0:0 encodes for step n + 2

A component's layers run on one sample at a time, whatever the slice: the bits of a sample's results
depend on how many are encoded together, and they are to be the same filled, in front and stored.
The first batch of a run, and all of an evaluation, is encoded in front: each of a component's homes
encodes its share of the samples, and all are told the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.encoders.pieces import EncoderPiece, States, run_pieces
from megatron_pulse.faults import told, unknown
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Filler, Kind, Schedule
from megatron_pulse.runtime.encoding.packing import PackedLayout
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.messages.links import Links
from megatron_pulse.runtime.settings import META, Batch

type Encoded = dict[str, dict[str, Tensor]]
"""States ``[b, ...]`` of a microbatch's samples by component and name."""


@dataclass(frozen=True)
class Frozen:
    """A frozen component as a device has it.

    ``given`` takes a microbatch and a row, and gives what the component's layers take of that
    sample, with a batch dimension of one, on the device that computes. ``results`` are the names of
    what is taken of the states after its last layer. ``homes`` are the devices that have its
    layers; elsewhere ``pieces`` is None.
    """

    name: str
    given: Callable[[Batch, int], States]
    results: tuple[str, ...]
    homes: tuple[int, ...]
    pieces: tuple[EncoderPiece, ...] | None


@dataclass(frozen=True)
class _Sizes:
    """What one sample leaves: after each layer, and as the component's results.

    ``kept[i]`` are those of what the component was given that layers after layer i take too.
    """

    layers: tuple[PackedLayout, ...]
    kept: tuple[tuple[str, ...], ...]
    results: PackedLayout


class Encoding:
    """Encodes the batches of one pipeline device; all devices of a pipeline make the same calls.

    ``device`` computes, ``number`` is the pipeline device, ``links`` lead to the others (None:
    there are none).
    """

    def __init__(
        self,
        components: Sequence[Frozen],
        device: torch.device,
        number: int = 0,
        links: Links | None = None,
    ) -> None:
        self.components = tuple(components)
        self._device, self._number, self._links = device, number, links
        self._sizes: dict[str, _Sizes] = {}
        self._fillers: tuple[Filler, ...] = ()
        self._batches: tuple[Batch, ...] = ()
        self._samples: list[tuple[Batch, int]] = []
        self._states: dict[tuple[str, int], States] = {}
        self._results: dict[tuple[str, int], States] = {}

    # --- in front -----------------------------------------------------------------------------

    def front(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> list[Encoded]:
        """The results of components (None: all) for every microbatch, on all devices."""
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
            self._tell(component, home, share, found)
        return _by_microbatch(batches, encoding, found)

    def _whole(self, component: Frozen, batch: Batch, row: int) -> States:
        assert component.pieces is not None
        states = run_pieces(component.pieces, component.given(batch, row))
        return {name: states[name] for name in component.results}

    def _tell(
        self,
        component: Frozen,
        home: int,
        share: Sequence[int],
        found: dict[tuple[str, int], States],
    ) -> None:
        """Let all devices have what ``home`` has encoded."""
        assert self._links is not None
        layout = self._sizes[component.name].results
        if not len(share):
            return
        if home == self._number:
            buffer = layout.pack([found[component.name, s] for s in share], self._device)
        else:
            buffer = torch.empty(
                len(share) * layout.num_bytes, dtype=torch.uint8, device=self._device
            )
        self._links.broadcast(buffer, home, f"results of {component.name}")
        for sample, states in zip(share, layout.unpack(buffer, len(share)), strict=True):
            found[component.name, sample] = states

    def _learn(self, batches: Sequence[Batch]) -> None:
        """What a sample leaves after each layer: the first home of each component says it."""
        for component in self.components:
            if component.name in self._sizes:
                continue
            sizes: _Sizes | None = None
            if component.homes[0] == self._number:
                sizes = _measured(component, batches[0])
            if self._links is not None:
                what = f"the sizes of {component.name}"
                sizes = self._links.tell(sizes, component.homes[0], what)
            assert sizes is not None
            self._sizes[component.name] = sizes

    # --- in idle time -------------------------------------------------------------------------

    def fill(self, schedule: Schedule, batches: Sequence[Batch]) -> None:
        """The fillers of ``schedule`` are to encode ``batches``; PulseError if they cannot."""
        samples = _rows(batches)
        if faults := list(self._filler_faults(schedule, len(samples))):
            raise PulseError(told("the plan's fillers", faults))
        self._learn(batches)
        self._fillers, self._batches, self._samples = schedule.fillers, tuple(batches), samples
        self._states.clear()
        self._results.clear()

    def workloads(self, schedule: Schedule) -> list[Callable[[int], None]]:
        """What the fillers of ``schedule`` run."""
        return [self._workload(number) for number in range(len(schedule.fillers))]

    def filled(self) -> list[Encoded]:
        """The results that this device reads, of every microbatch, when the step has ended."""
        batches, found = self._batches, dict(self._results)
        read = [self._component(f.name) for f in self._fillers if self._number in f.readers]
        self._batches, self._samples = (), []
        self._states.clear()
        self._results.clear()
        return _by_microbatch(batches, read, found)

    def _workload(self, number: int) -> Callable[[int], None]:
        def work(slice_: int) -> None:
            filler = self._fillers[number]
            component = self._component(filler.name)
            assert component.pieces is not None  # as fill has seen
            first, last, one, end = filler.pieces[slice_]
            for sample in range(one, end):
                if first:
                    states = self._states.pop((filler.name, sample))
                else:
                    states = component.given(*self._samples[sample])
                states = run_pieces(component.pieces[first:last], states)
                if last < len(component.pieces):
                    self._states[filler.name, sample] = states
                else:
                    kept = {name: states[name] for name in component.results}
                    self._results[filler.name, sample] = kept

        return work

    def outgoing(self, message: Message) -> Tensor:
        """What a slice has left, as bytes."""
        name, samples, layout = self._content(message)
        if message.consumer == STEP_END:
            return layout.pack([self._results[name, s] for s in samples], self._device)
        found = [self._states.pop((name, sample)) for sample in samples]
        return layout.pack(found, self._device, self._kept(message))

    def like(self, message: Message) -> Tensor:
        """A tensor without memory, like what a slice of another device has left."""
        _, samples, layout = self._content(message)
        size = len(samples) * layout.num_bytes
        return torch.empty(size, dtype=torch.uint8, device=META)

    def take(self, message: Message, tensor: Tensor) -> None:
        """What a slice of another device has left is here."""
        name, samples, layout = self._content(message)
        states = layout.unpack(tensor, len(samples))
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
        """What the component was given of a sample that later layers take: it is here as well."""
        filler = self._fillers[message.producer.stage]
        return self._sizes[filler.name].kept[filler.pieces[message.producer.microbatch][1] - 1]

    def _content(self, message: Message) -> tuple[str, range, PackedLayout]:
        """The component, the samples, and what is sent of each."""
        filler = self._fillers[message.producer.stage]
        _, last, one, end = filler.pieces[message.producer.microbatch]
        sizes = self._sizes[filler.name]
        if message.consumer == STEP_END:
            return filler.name, range(one, end), sizes.results
        _, _, first, after = filler.pieces[message.consumer.microbatch]
        return filler.name, range(max(one, first), min(end, after)), sizes.layers[last - 1]

    def _component(self, name: str) -> Frozen:
        return next(c for c in self.components if c.name == name)

    def _filler_faults(self, schedule: Schedule, num_samples: int) -> Iterator[str]:
        """Why the fillers are not those that encode so many samples with these components."""
        names = [component.name for component in self.components]
        for number, filler in enumerate(schedule.fillers):
            if filler.name not in names:
                yield unknown("component", filler.name, names)
                continue
            component = self._component(filler.name)
            pieces = component.pieces
            if not filler.pieces:
                yield f"{filler.name}: its slices do not say which layers and samples they are"
                continue
            if pieces is not None and (last := max(p[1] for p in filler.pieces)) != len(pieces):
                yield f"{filler.name} has {len(pieces)} layers, the plan's has {last}"
            if (last := max(p[3] for p in filler.pieces)) != num_samples:
                yield f"{filler.name} encodes {last} samples, a step of each pipeline {num_samples}"
            if any(need.filler != number for needs in filler.needs for need in needs):
                yield f"{filler.name} waits for results of another component, which none here does"
            own = schedule.order[self._number]
            if pieces is None and any(op.kind is Kind.FILLER and op.stage == number for op in own):
                yield f"{filler.name} runs on device {self._number}, which does not have it"


def _measured(component: Frozen, batch: Batch) -> _Sizes:
    """Run one sample layer by layer."""
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
    """Every sample of a step: its microbatch, and its row there."""
    return [(batch, row) for batch in batches for row in range(len(batch["index"]))]


def _by_microbatch(
    batches: Sequence[Batch],
    components: Sequence[Frozen],
    found: Mapping[tuple[str, int], States],
) -> list[Encoded]:
    """States of samples, joined along each microbatch."""
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
