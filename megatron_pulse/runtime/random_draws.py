"""Detection of random draws by layers, losses and backward passes.

A draw from a process-wide generator depends on all earlier draws in the process, and so on the
layers that the process holds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.tracing.checks.module_state import files_of
from megatron_pulse.tracing.checks.untraced_effects import other_generators

UNREPEATED = (
    "which differ between layouts. Set its dropout to 0, or draw the numbers with the batch and "
    "pass them as a batch field (uses of pulse.Layer)"
)
"""Reason for refusing draws, and the remedy."""
_RESERVING = "transformer_engine."


class RngWatch:
    """Detects draws since construction from torch's CPU generator and (``gpu``) the current GPU's.

    With ``whole``, Python's and numpy's generators are watched as well. So are those in attributes
    of ``module`` and in the source files of its classes. This takes about 0.1 ms.
    """

    def __init__(
        self, module: nn.Module | None = None, *, whole: bool = False, gpu: bool = True
    ) -> None:
        self._module, self._whole, self._gpu = module, whole, gpu
        self._before = self._states()

    def who(self) -> list[str]:
        """Generators that have drawn, named by their owners."""
        now = self._states()
        return [
            name
            for name, state in self._before.items()
            if name in now and not _same(state, now[name])
        ]

    def fault(self) -> str | None:
        """Description of random draws since construction; None without draws."""
        if not (names := self.who()):
            return None
        return f"draws random numbers (of {' and '.join(names)}), {UNREPEATED}"

    def _states(self) -> dict[str, Any]:
        found: dict[str, Any] = {"torch's generator": torch.default_generator.get_state()}
        if self._gpu and torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            found["the GPU's generator"] = generator.initial_seed(), generator.get_offset()
        if self._whole:
            found |= {f"{name}'s generator": state for name, state in other_generators().items()}
            found |= {} if self._module is None else dict(_own(self._module))
        return found


def reserves_numbers(module: nn.Module) -> bool:
    """True if kernels of a module advance the GPU's generator without using its numbers.

    Transformer Engine's fused attention does so without dropout.
    """
    classes = {base for part in module.modules() for base in type(part).__mro__}
    return any(base.__module__.startswith(_RESERVING) for base in classes)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """States of a module's own generators, by location."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if (state := _state(value)) is not None:
                yield f"its generator {prefix}.{name}".replace(" .", " "), state
    for file, contents in files_of(module).items():
        for name, value in list(vars(contents).items()):
            if (state := _state(value)) is not None:
                yield f"the generator {file}.{name}", state


def _state(value: Any) -> Any:
    """State of a generator; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.RandomState):
            return str(value.get_state(legacy=False))
        if isinstance(value, numpy.random.Generator):
            return str(value.bit_generator.state)
    return None


def _same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)
