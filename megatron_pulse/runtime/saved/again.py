"""What a layer saves for its backward pass, computed again when it is wanted, or before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.saved.written import Watched, written


class Again:
    """One layer on one microbatch, of which only what it takes is kept.

    ``layer`` computes it, and must come to the same whenever it is called: it draws nothing at
    random, and writes into none of the tensors that ``state`` names, or PulseError is raised, and
    later, where it writes into what it has saved and a backward wants that. What its operations
    save is dropped, and numbered::

        forward()    layer ----> 0, 1, 2, ...                       numbers in autograd's graph
        compute()    layer ----> saved tensors 0, 1, 2, ...         once more; ends with the last
        backward                 ... 2, 1, 0 are taken, and free    computes, if compute() has not

    As torch's own ``checkpoint`` does, which cannot be told to begin: here that may be while a
    gradient is awaited.
    """

    def __init__(
        self, name: str, layer: Callable[[], Any], state: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._name, self._layer, self._state = name, layer, state
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._watched: list[Watched] = []
        self._found: dict[int, Tensor] | None = None
        self._within: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()

    def forward(self) -> Any:
        """What the layer returns."""
        self._within = tuple(_autocasts())
        before = {what: (one, one._version) for what, one in self._state().items()}
        drawn = list(_drawn())
        with saved_tensors_hooks(self._number, self._take):
            results = self._layer()
        for each in self._watched:
            each.settle()
        now = self._state()
        unlike = [
            f"writes into {what}"
            for what, (one, version) in before.items()
            if one._version != version or now.get(what) is not one
        ]
        if not all(map(torch.equal, drawn, _drawn())):
            unlike.append("draws random numbers")
        if unlike:
            raise PulseError(
                f"layer {self._name} {' and '.join(unlike)} while it runs, and would do it again: "
                "its activations cannot be computed again (leave it out of --pulse-recompute, or "
                "make the plan with --no-recompute)"
            )
        return results

    def compute(self) -> None:
        """Have all that was saved; nothing where it is there."""
        if self._found is not None:
            return
        found: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> int:
            number = len(found)
            if self._saved[number] != (tensor.shape, tensor.dtype):
                raise PulseError(
                    f"what is computed again differs: {tuple(tensor.shape)} {tensor.dtype} instead "
                    f"of {tuple(self._saved[number][0])} {self._saved[number][1]}"
                )
            found[number] = tensor.detach()
            if len(found) == len(self._saved):
                raise _Enough
            return number

        with ExitStack() as stack:
            for make_context in self._within:
                stack.enter_context(make_context())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, _never))
            try:
                if self._saved:
                    self._layer()
            except _Enough:
                pass
        if len(found) < len(self._saved):
            raise PulseError(
                f"a layer that is computed again saves {len(found)} tensors, it saved "
                f"{len(self._saved)} before"
            )
        self._found = found

    def _number(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        self._watched.append(Watched(tensor))
        return len(self._saved) - 1

    def _take(self, number: int) -> Tensor:
        if self._watched[number].is_written:
            raise written(self._name)
        self.compute()
        assert self._found is not None
        if number not in self._found:
            raise PulseError("a backward pass takes what it saved twice: it is there once")
        return self._found.pop(number)


class _Enough(Exception):
    """All that was saved is there."""


def _never(number: int) -> Tensor:
    raise AssertionError(f"nobody goes back through what is computed again ({number})")


def _drawn() -> Iterator[Tensor]:
    """What tells whether random numbers were drawn since: of the CPU and of the current GPU."""
    yield torch.get_rng_state()
    if torch.cuda.is_initialized():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        yield torch.tensor(generator.get_offset())


def _autocasts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """The regions of autocast that are open here."""
    return [
        partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
