"""Random numbers that layers, losses and backward passes draw, and blocks that leave none drawn.

What is drawn from a generator of the process depends on all that was drawn before it there, and so
on which layers the process has.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.derived.refused.kept import files_of
from megatron_pulse.backbone.derived.refused.untraced import other_generators

UNREPEATED = (
    "which no other layout repeats: set its dropout to 0, or draw them where batches are made and "
    "give them as a field of the batch (pulse.Layer has uses)"
)
"""The reason why draws are refused, and the remedy."""
_RESERVING = "transformer_engine."


class DrawWatch:
    """Sees which generators draw from now on: torch's of the CPU and (``gpu``) the current GPU.

    Where ``whole``, also Python's, numpy's and those that ``module`` has in an attribute or its
    classes have beside them in their files; that takes some 0.1 ms.
    """

    def __init__(
        self, module: nn.Module | None = None, *, whole: bool = False, gpu: bool = True
    ) -> None:
        self._module, self._whole, self._gpu = module, whole, gpu
        self._before = self._states()

    def who(self) -> list[str]:
        """The generators that have drawn, by whose they are."""
        now = self._states()
        return [
            name
            for name, state in self._before.items()
            if name in now and not _same(state, now[name])
        ]

    def fault(self) -> str | None:
        """Random numbers drawn since, as a fault of what drew them; None for none."""
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
    """True if kernels of a module advance the GPU's generator, though they use none of its numbers.

    Transformer Engine's fused attention does so without dropout.
    """
    classes = {base for part in module.modules() for base in type(part).__mro__}
    return any(base.__module__.startswith(_RESERVING) for base in classes)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The states of a module's own generators, by where they are."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if (state := _state(value)) is not None:
                yield f"its generator {prefix}.{name}".replace(" .", " "), state
    for file, contents in files_of(module).items():
        for name, value in list(vars(contents).items()):
            if (state := _state(value)) is not None:
                yield f"the generator {file}.{name}", state


def _state(value: Any) -> Any:
    """The state of a generator; None for anything else."""
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
