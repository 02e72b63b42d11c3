"""Replay of a module's own initialisation, for some of its parameters at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron_pulse.errors import describe_exception
from megatron_pulse.tracing.checks.untraced_effects import other_generators
from megatron_pulse.tracing.initial_weights.op_tape import StorageView, Tape
from megatron_pulse.tracing.initial_weights.recorder import TapeRecorder
from megatron_pulse.tracing.initial_weights.sources import Weights
from megatron_pulse.tracing.torch_export import DerivationError


def from_scratch(make: Callable[[], nn.Module]) -> Weights:
    """Parameters of ``torch.manual_seed(seed); make()``, bit for bit, on the CPU.

    ``make`` runs on first use without memory for the module; one tensor at a time is drawn. The
    steps that fill a parameter are replayed on each access. Data that ``make`` reads from files is
    kept. Raises DerivationError listing all parameters and buffers for which this is impossible,
    with reasons.
    """

    @functools.lru_cache(maxsize=1)
    def parameters(seed: int) -> Mapping[str, Tensor]:
        return _record(make, seed)

    return Weights(parameters, is_new=True)


class _Recorded(Mapping[str, Tensor]):
    """Parameters by name: ``given`` ones are copied, others replayed on access."""

    def __init__(
        self,
        names: list[str],
        tape: Tape,
        places: Mapping[str, StorageView],
        given: Mapping[str, Tensor],
    ) -> None:
        self._names, self._tape, self._places, self._given = names, tape, places, given

    def __getitem__(self, name: str) -> Tensor:
        if name in self._given:
            return self._given[name].clone(memory_format=torch.preserve_format)
        tensor = self._tape.play(self._places[name])
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone(memory_format=torch.preserve_format)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _record(make: Callable[[], nn.Module], seed: int) -> Mapping[str, Tensor]:
    others = other_generators()
    recorder = TapeRecorder()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with recorder.making():
                module = make()
            if recorder.faults:  # faults that ``make`` caught
                raise recorder.faults[0]
        except Exception as error:  # any operation that needs values may raise
            raise DerivationError(
                "the module",
                [f"it cannot be built on the meta device: {describe_exception(error)}"],
            ) from error
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    faults = [
        f"{name} is left on the meta device, without values: do its files lack it?"
        for name, tensor in (*parameters.items(), *module.named_buffers())
        if tensor.is_meta
    ]
    if faults:
        raise DerivationError(type(module).__name__, faults)
    given = {name: tensor for name, tensor in parameters.items() if recorder.is_given(tensor)}
    drawn = {name: tensor for name, tensor in parameters.items() if name not in given}
    places = {name: recorder.place(tensor) for name, tensor in drawn.items()}
    faults += [
        f"{name}'s random numbers do not follow torch's seed. Use torch's generators"
        for name, state in other_generators().items()
        if others.get(name, state) != state
    ]
    for name, place in places.items():
        steps = recorder.tape.history(place.storage)
        if all(step.leaves_unfilled for step in steps):
            faults.append(f"the parameter {name} is made by torch.empty and never filled")
    for name, buffer in module.named_buffers():
        steps = recorder.tape.history(recorder.place(buffer).storage)
        if recorder.has_no_memory(buffer):
            faults.append(
                f"the buffer {name} is computed from parameters, and would not follow their "
                "training"
            )
        elif any(step.state is not None for step in steps):
            faults.append(
                f"the buffer {name} is drawn at random, but checkpoints have no buffers. Make it "
                "a parameter with requires_grad=False"
            )
    if faults:
        raise DerivationError(type(module).__name__, faults)
    recorder.tape.keep(place.storage for place in places.values())
    return _Recorded(list(parameters), recorder.tape, places, given)
