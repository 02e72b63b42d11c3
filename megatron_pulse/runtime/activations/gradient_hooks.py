"""Hooks on the gradients of a layer's inputs, which the layer registers in forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def hooks_of(tensor: Tensor) -> frozenset[int]:
    """Numbers of the hooks on a tensor's gradient that a user's code registered.

    Hooks of torch and of this package watch: they count operations, or keep a gradient to compare.
    """
    hooks = tensor._backward_hooks or {}
    return frozenset(number for number, hook in hooks.items() if _is_of_user(hook))


def _is_of_user(hook: Callable[..., Any]) -> bool:
    module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return module.partition(".")[0] not in ("torch", "megatron_pulse")


@contextmanager
def hooks_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove hooks registered within; a recomputation would register those of forward again."""
    before = [(tensor, hooks_of(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, known in before:
            hooks = tensor._backward_hooks or {}
            for number in hooks_of(tensor) - known:
                del hooks[number]


class SummedInputCheck:
    """Hooks on ``tensors``, by kind and number or name, at construction.

    Other layers take the same tensors. A layer's hook runs on the gradient of this layer alone,
    under any layout. In a plain loop it runs on the sum of all layers' gradients.
    """

    def __init__(self, tensors: Mapping[tuple[str, int | str], Tensor]) -> None:
        self._tensors = tensors
        self._hooks = {what: hooks_of(tensor) for what, tensor in tensors.items()}

    def fault(self) -> str | None:
        """Description of tensors with a hook registered since; None if there are none."""
        names = [
            f"{kind} {name}"
            for (kind, name), tensor in self._tensors.items()
            if hooks_of(tensor) != self._hooks[kind, name]
        ]
        if not names:
            return None
        return (
            f"registers a hook on the gradient of {' and '.join(names)}. Another layer takes the "
            "same tensor, and the hook would see this layer's gradient instead of the sum. "
            "Register it on a view of the tensor: x = x.view_as(x)"
        )
