"""What a trace of operations on tensors leaves out, so that a chain made of it would be wrong:
backward passes and hooks of one's own, Python's random numbers, what a module counts."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from megatron_pulse.backbone.derived.reading import TORCH
from megatron_pulse.backbone.derived.refused.kept import changed, kept

_APPLY: FunctionType = vars(torch.autograd.Function)["apply"].__func__
"""What runs an autograd.Function, also where ``Function.apply`` was given another name before."""


@contextmanager
def watched(module: nn.Module) -> Iterator[list[str]]:
    """What ``module`` has, and does within, that no trace holds, with lines; full at the end."""
    faults = list(_hooks(module))

    def own_backward(function: type) -> None:
        if function is CheckpointFunction:
            faults.append(f"checkpoint at {_caller()}: only use_reentrant=False can be traced")
        elif function is not BackwardHookFunction:  # that of the hooks above
            faults.append(
                f"{function.__name__} is an autograd.Function, at {_caller()}: its own backward is "
                "not traced; write it as operations that autograd knows"
            )

    def own_hook(_: Tensor) -> None:
        faults.append(f"a tensor's gradient has a hook, at {_caller()}: it is not traced")

    def compare(called: nn.Module, *_: Any) -> None:
        faults.extend(changed(before, kept(called)))

    before, drawn = kept(module), other_generators()
    after = module.register_forward_hook(compare)  # a trace leaves the module as it was
    try:
        with _calls(_APPLY, own_backward), _telling(Tensor, "register_hook", own_hook):
            yield faults
    finally:
        after.remove()
    faults += [
        f"{name}'s random numbers are drawn in forward: a chain would always have the first"
        for name, now in other_generators().items()
        if drawn.get(name, now) != now
    ]
    faults[:] = dict.fromkeys(faults)


@contextmanager
def _calls(function: FunctionType, tell: Callable[[Any], None]) -> Iterator[None]:
    """Within, the first argument of ``function`` is told when it is called, by whatever name."""
    events = sys.monitoring
    tool = next(i for i in (3, 4, 1, 2, 0, 5) if events.get_tool(i) is None)

    def begun(_code: Any, _offset: int) -> None:
        tell(sys._getframe(1).f_locals[function.__code__.co_varnames[0]])

    events.use_tool_id(tool, __name__)
    try:
        events.register_callback(tool, events.events.PY_START, begun)
        events.set_local_events(tool, function.__code__, events.events.PY_START)
        yield
    finally:
        events.set_local_events(tool, function.__code__, 0)
        events.register_callback(tool, events.events.PY_START, None)
        events.free_tool_id(tool)


@contextmanager
def _telling(owner: type, name: str, tell: Callable[[Any], None]) -> Iterator[None]:
    """Within, a method's first argument is told before each call."""
    method = vars(owner)[name]

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        tell(first)
        return method(first, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def _caller() -> str:
    """The innermost line that runs just now and is not torch's, nor of this file."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename != __file__ and not frame.filename.startswith(TORCH)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _hooks(module: nn.Module) -> Iterator[str]:
    """Those that gradients pass, which were set before the call."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"{name or 'the module'} has hooks of its backward pass: they are not traced"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the gradient of {name} has a hook, which its copy in a chain would not have"


def other_generators() -> dict[str, Any]:
    """The states of the generators that are no operation's, and that torch's seed does not set."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = (kind, words.tobytes(), *rest)
    return states
