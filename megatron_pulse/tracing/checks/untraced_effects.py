"""Detection of effects that a trace of tensor operations does not record.

These are custom backward passes, hooks, Python's random numbers and a module's counters. A chain
without them would be wrong.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from megatron_pulse.tracing.checks.module_state import changed, kept
from megatron_pulse.tracing.checks.torch_patches import alike, caller, replaced, telling
from megatron_pulse.tracing.checks.torch_settings import changed_settings
from megatron_pulse.tracing.graph_analysis import TORCH

_APPLY: FunctionType = vars(torch.autograd.Function)["apply"].__func__
"""Implementation of ``Function.apply``, also where called under another name."""


@dataclass
class UntracedEffects:
    """Unrecorded effects of a module.

    ``faults`` are certain, with source lines; ``suspects`` are calls at which export may stop
    without naming a line.
    """

    faults: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)


@contextmanager
def watched(module: nn.Module) -> Iterator[UntracedEffects]:
    """Collect unrecorded effects of ``module`` within the context; complete on exit."""
    unseen = UntracedEffects(list(_hooks(module)))
    faults, suspects = unseen.faults, unseen.suspects

    def own_backward(function: type) -> None:
        if function is CheckpointFunction:
            faults.append(f"checkpoint at {caller()}: only use_reentrant=False can be traced")
        elif function.__module__.startswith("torch._higher_order_ops."):
            pass  # torch's own recording of a branch, reported by refusals
        elif function is not BackwardHookFunction:  # hooks are reported above
            faults.append(
                f"{function.__name__} is an autograd.Function, at {caller()}: its backward is not "
                "traced. Use operations known to autograd"
            )

    def own_hook(_: Any) -> None:
        faults.append(f"a tensor's gradient has a hook, at {caller()}: it is not traced")

    def own_saving(hooks: saved_tensors_hooks) -> None:
        if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            faults.append(
                f"{type(hooks).__name__} at {caller()} change saved tensors of backward: they are "
                "not traced"
            )

    def inference(_: Any) -> None:
        if not sys._getframe(2).f_code.co_filename.startswith(_FAKE_TENSORS):
            faults.append(
                f"torch.inference_mode at {caller()} is not traced: gradients would pass. Write "
                "torch.no_grad()"
            )

    def grad_fn(tensor: Tensor) -> Any:
        node = _GRAD_FN.__get__(tensor)
        return node if node is None or _called_by_torch() else _Node(node, own_hook)

    def data(tensor: Tensor) -> Any:
        if not _called_by_torch():
            suspects.append(f".data at {caller()} (write .detach())")
        return _DATA.__get__(tensor)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        suspects.append(f"autograd.grad at {caller()} (a gradient within forward)")
        return grad(*args, **kwargs)

    def compare(called: nn.Module, *_: Any) -> None:
        faults.extend(changed(before, kept(called)))

    before, drawn = kept(module), other_generators()
    after = module.register_forward_hook(compare)  # a trace leaves the module unchanged
    try:
        with (
            calls(_APPLY, "cls", own_backward),
            telling(Tensor, "register_hook", own_hook),
            telling(Tensor, "register_post_accumulate_grad_hook", own_hook),
            telling(saved_tensors_hooks, "__enter__", own_saving),
            telling(torch.inference_mode, "__enter__", inference),
            replaced(Tensor, "grad_fn", property(grad_fn)),
            replaced(Tensor, "data", property(data, _DATA.__set__)),
            replaced(torch.autograd, "grad", gradient),
            changed_settings(faults),
        ):
            yield unseen
    finally:
        after.remove()
    faults += [
        f"{name} draws random numbers in forward: a chain would always repeat the first"
        for name, now in other_generators().items()
        if drawn.get(name, now) != now
    ]
    faults[:], suspects[:] = alike(faults), dict.fromkeys(suspects)


_FAKE_TENSORS = str(Path(TORCH) / "_subclasses")
"""Part of torch that itself enters and leaves inference mode in a trace."""

_GRAD_FN, _DATA = (inspect.getattr_static(Tensor, name) for name in ("grad_fn", "data"))


def _called_by_torch() -> bool:
    """True if torch itself reads an attribute that is replaced."""
    return sys._getframe(2).f_code.co_filename.startswith(TORCH)


@contextmanager
def calls(function: Any, argument: str, tell: Callable[[Any], None]) -> Iterator[None]:
    """Call ``tell`` with an argument of each call of ``function``, under any name."""
    events = sys.monitoring
    tool = next(i for i in (3, 4, 1, 2, 0, 5) if events.get_tool(i) is None)

    def begun(_code: Any, _offset: int) -> None:
        tell(sys._getframe(1).f_locals[argument])

    events.use_tool_id(tool, __name__)
    try:
        events.register_callback(tool, events.events.PY_START, begun)
        events.set_local_events(tool, function.__code__, events.events.PY_START)
        yield
    finally:
        events.set_local_events(tool, function.__code__, 0)
        events.register_callback(tool, events.events.PY_START, None)
        events.free_tool_id(tool)


class _Node:
    """Autograd node that reports registered hooks."""

    def __init__(self, node: Any, tell: Callable[[Any], None]) -> None:
        self._node, self._tell = node, tell

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._tell(self._node)
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node and _Node(node, self._tell), i) for node, i in found)
        return found


def _hooks(module: nn.Module) -> Iterator[str]:
    """Faults for gradient hooks set before the call."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"{name or 'the module'} has hooks of its backward pass: they are not traced"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the gradient of {name} has a hook, which its copy in a chain would lack"


def other_generators() -> dict[str, Any]:
    """States of the generators that torch's seed does not set and operations do not use."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = (kind, words.tobytes(), *rest)
    return states
