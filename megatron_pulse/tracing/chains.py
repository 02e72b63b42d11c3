"""Derived chains of a module, one per shape and microbatch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.processes import without_collecting
from megatron_pulse.tracing.cache.chain_cache import cached_chain
from megatron_pulse.tracing.checks.module_state import is_small
from megatron_pulse.tracing.graph_analysis import UNKNOWN
from megatron_pulse.tracing.input_roles import Inputs
from megatron_pulse.tracing.module_modes import ModuleModes
from megatron_pulse.tracing.torch_export import DerivationError, export
from megatron_pulse.tracing.unit_assignment import SizeDecisions
from megatron_pulse.tracing.units import UnitChain, derive, unit_difference


class Chains:
    """Chains of one module, exported on first use of a shape, microbatch size and mode.

    ``inputs`` holds the inputs of each shape. All chains have the units of ``first``, the chain of
    the first shape and of its example's ``size``. ``constants`` are inputs equal for every batch;
    ``output`` is the index of the prediction among several results. The module's mode of now is the
    chain's training mode, whatever the module's mode later.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        inputs: Sequence[Inputs],
        output: int | None,
        pieces: bool,
    ) -> None:
        self.module, self._name, self._inputs = module, name, tuple(inputs)
        self.output, self._pieces = output, pieces
        self._device = torch.get_default_device()
        self._modes = ModuleModes(module)
        self._found: dict[tuple[int, int, bool], UnitChain] = {}
        self.size, self.constants = inputs[0].size, inputs[0].constants
        self.first = self[0, self.size]

    def __getitem__(self, at: tuple[int, int]) -> UnitChain:
        """Chain in training mode for an index of a shape and a microbatch size (``find``)."""
        return self.find(*at)

    def find(self, shape_index: int, size: int, training: bool = True) -> UnitChain:
        """Chain for an index of a shape, a microbatch size and a mode.

        Raises DerivationError if the module cannot be exported there, or if units differ.
        """
        at = shape_index, size, training or not self._modes.matters
        if at not in self._found:
            chain = self.alone(lambda: self._derive(*at))
            if self._found and (fault := unit_difference(self.first, chain)):
                raise DerivationError(self._name, [self._other_path(*at, fault)])
            self._found[at] = chain
        return self._found[at]

    def _other_path(self, shape_index: int, size: int, training: bool, fault: str) -> str:
        if not training and (shape_index, size, True) in self._found:
            return (
                "evaluation mode takes another path through the module than training mode (a "
                f"branch in forward depends on self.training): {fault}. Keep the pipeline in "
                "training mode, or evaluate a chain of the module after eval()"
            )
        what = f"microbatches of {size}" + (f" of shape {shape_index}" if shape_index else "")
        return (
            f"{what} take another path through the module than microbatches of {self.size} (a "
            f"loop, branch or size in forward may depend on the batch): {fault}"
        )

    def _derive(self, shape_index: int, size: int, training: bool) -> UnitChain:
        inputs = self._inputs[shape_index]
        given = inputs.make(size)

        def derived() -> tuple[UnitChain, bool]:
            try:
                chain = self._derived(inputs, given, with_lines=False)
            except DerivationError as error:
                if UNKNOWN not in str(error):
                    raise
                chain = self._derived(inputs, given, with_lines=True)
            return chain, self._modes.is_read

        with self._modes.of_chain(training):
            if is_small(self.module):  # takes no time, and is compared with its chain
                return derived()[0]
            like = self._like and (self._like.begins, sorted(self._like.small))
            settings = inputs.sample, sorted(inputs.constants), self.output, self._pieces, like
            chain, is_read = cached_chain(self.module, given, settings, derived)
            self._modes.is_read |= is_read
            return chain

    @property
    def of_shapes(self) -> list[UnitChain]:
        """Chain of each shape, at its example's microbatch size."""
        return [self[index, inputs.size] for index, inputs in enumerate(self._inputs)]

    def with_lines(self, shape_index: int) -> UnitChain:
        """Chain of a shape whose operations have source lines."""
        inputs = self._inputs[shape_index]
        with self._modes.of_chain(training=True):
            given = inputs.make(inputs.size)
            return self.alone(lambda: self._derived(inputs, given, with_lines=True))

    def example(self) -> Mapping[str, Any]:
        """Example inputs of the first chain."""
        return self._inputs[0].make(self.size)

    def alone[T](self, call: Callable[[], T]) -> T:
        """Run ``call`` in a separate thread, outside modes and hooks of the calling thread.

        Modes, recomputation hooks and no_grad do not apply there; the default device does. Random
        draws of ``call`` leave the process's generators unchanged.
        """

        def called() -> T:
            device = nullcontext() if self._device.type == "cpu" else self._device
            with device, _without_hooks_of_all(), generators_kept():
                return call()

        with ThreadPoolExecutor(1) as thread, without_collecting():
            return thread.submit(called).result()

    def _derived(self, inputs: Inputs, given: Mapping[str, Any], with_lines: bool) -> UnitChain:
        exported = export(self.module, given, inputs.constants, self.output, with_lines)
        return derive(exported, self._name, inputs.sample, self._pieces, self._like)

    @property
    def _like(self) -> SizeDecisions | None:
        return self.first.decided if self._found else None


@contextmanager
def _without_hooks_of_all() -> Iterator[None]:
    """Remove global module hooks, such as operation counters, which are not per thread."""
    hooks = [
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, kept, strict=True):
            each.update(own)
