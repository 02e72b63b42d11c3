"""Silent data corruption (SDC) check: another rank recomputes one layer of one microbatch.

``--pulse-verify-every`` sets the interval::

  rank a   step: ... the layer forward ... and backward ... | inputs, results, and weights
  rank b   step: ...........................................| computes the same, compares the bits

Each checked step takes another pair of ranks, another layer and another microbatch. The layer's
results and the gradients of its inputs are compared; gradients of its weights are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.dropout_key import set_dropout_key
from megatron_pulse.backbone.shape_buckets import set_shape_index
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.planner.program.device_program import Run
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.tensor_settings import compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS

Tensors = list[Tensor]


@dataclass
class LayerOutputs:
    """Results of a layer for a microbatch, and gradients of its inputs, by position; on the CPU."""

    results: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def differs(self, other: LayerOutputs) -> str:
        """Names of the values that differ from ``other`` in any bit; empty if none."""
        pairs = (("results", self.results, other.results),
                 ("gradients", self.gradients, other.gradients))  # fmt: skip
        return " and ".join(
            name
            for name, ours, theirs in pairs
            if ours.keys() != theirs.keys() or not all(_same(ours[i], theirs[i]) for i in ours)
        )


@dataclass
class CheckedLayerCall:
    """Operation of a layer: its weights, its inputs, and the gradients of its results.

    ``wants`` marks inputs with gradients. ``compared`` are positions of inputs with gradients that
    the layer does not pass on unchanged. ``names`` describe the order of inputs.
    """

    layer: str
    microbatch: int
    state: dict[str, Any] = field(default_factory=dict)
    shape: int = 0
    dropout_key: tuple[int, int] | None = None
    names: tuple[int, list[str], list[str]] = (0, [], [])
    given: Tensors = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    returned: dict[int, Tensor] = field(default_factory=dict)

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """``tensors`` as a layer takes them: boundary, skips and conditioning."""
        count, popped, used = self.names
        rest = iter(tensors[count:])
        return (
            tuple(tensors[:count]),
            {name: next(rest) for name in popped},
            {name: next(rest) for name in used},
        )


class SdcCheck:
    """SDC check of every ``every``-th step; ``steps()`` counts the steps made so far.

    Layers run in ``token_slices``, as in the step.
    """

    def __init__(
        self, every: int, steps: Callable[[], int], backbone: Backbone, token_slices: int = 1
    ) -> None:
        self._every, self._steps, self._token_slices = every, steps, token_slices
        self._layers = {layer.name: layer for layer in backbone.layers}

    @contextmanager
    def verifying(
        self,
        chunks: Iterable[nn.Module],
        group: dist.ProcessGroup,
        num_microbatches: int,
        replicated: frozenset[str],
    ) -> Iterator[None]:
        """Check the step that this rank makes on ``chunks`` within, if this step is to be checked.

        Two ranks of ``group`` then compare. Raises PulseError on both if they differ.
        """
        done = self._steps() + 1
        turn, size = done // self._every - 1, group.size()
        owner = turn % size
        helper = (owner + 1 + turn // size % (size - 1)) % size
        if done % self._every or group.rank() not in (owner, helper):
            yield
            return
        inner = [unwrap(chunk) for chunk in chunks]
        context = LayerContext(copy.copy(inner[0].config), inner[0].pg_collection)
        device = compute_device()
        if group.rank() == owner:
            layers = [
                (name, module)
                for stage in inner
                for name, module in stage.named_layers()
                if name not in replicated
            ]
            name, module = layers[turn // size % len(layers)]
            task, seen = CheckedLayerCall(name, turn % num_microbatches), LayerOutputs()
            handle = module.register_forward_hook(partial(_keep, task, seen))
            try:
                yield
            finally:
                handle.remove()
            task.state = _on_cpu(module.state_dict())
        else:
            yield
        with PROGRESS.during(f"verifying step {done}"):
            if group.rank() == owner:
                self._ask(task, seen, helper, group, context, device)
            else:
                self._answer(done, owner, group, context, device)

    def _ask(
        self,
        task: CheckedLayerCall,
        seen: LayerOutputs,
        helper: int,
        group: dist.ProcessGroup,
        context: LayerContext,
        device: torch.device,
    ) -> None:
        _send((task, seen), helper, group)
        if _received(helper, group):
            again = self._computed(task, context, device)
            _send(again, helper, group)
            raise PulseError(_received(helper, group))

    def _answer(
        self,
        step: int,
        owner: int,
        group: dist.ProcessGroup,
        context: LayerContext,
        device: torch.device,
    ) -> None:
        task, seen = _received(owner, group)
        mine = self._computed(task, context, device)
        what = mine.differs(seen)
        _send(what, owner, group)
        if not what:
            return
        again: LayerOutputs = _received(owner, group)
        first, second = dist.get_global_rank(group, owner), dist.get_rank()
        if not again.differs(mine):
            then = f"the result of rank {second}: rank {first} computed wrongly"
        elif not again.differs(seen):
            then = "the same result as before: one of them computes wrongly"
        else:
            then = f"a third result: rank {first} computes wrongly"
        text = (
            f"step {step}, microbatch {task.microbatch}, layer {task.layer}: {what} of ranks "
            f"{second} and {first} differ. Rank {first}, repeated, gets {then}. Test both "
            "devices, and continue from an earlier checkpoint"
        )
        _send(text, owner, group)
        raise PulseError(text)

    def _computed(
        self, task: CheckedLayerCall, context: LayerContext, device: torch.device
    ) -> LayerOutputs:
        """Repeat the operation on this rank, in a layer built for it."""
        with torch.random.fork_rng(devices=[]):
            module = self._layers[task.layer].build(context).to(device)
        module.load_state_dict(
            {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in task.state.items()
            },
            assign=True,
        )
        set_token_slices(module.modules(), self._token_slices)
        set_shape_index(module, task.shape)
        set_dropout_key(module, task.dropout_key)
        given = [
            tensor.to(device).requires_grad_(wants)
            for tensor, wants in zip(task.given, task.wants, strict=True)
        ]
        with torch.enable_grad():
            results = module(*task.arguments(given))
        made = LayerOutputs({i: _kept(result) for i, result in enumerate(results)})
        if task.returned:
            torch.autograd.backward(
                [results[i] for i in task.returned],
                [gradient.to(device) for gradient in task.returned.values()],
            )
        gradients = {i: given[i].grad for i in task.compared}
        made.gradients = {i: _kept(grad) for i, grad in gradients.items() if grad is not None}
        return made


def _keep(
    task: CheckedLayerCall, seen: LayerOutputs, module: nn.Module, given: Any, results: Any
) -> None:
    """Forward hook that copies inputs and results of the task's microbatch, and later gradients."""
    event = PROGRESS.event
    if (
        task.given
        or not torch.is_grad_enabled()
        or not isinstance(event, Run)
        or event.operation.kind is not OpType.FORWARD
        or event.operation.microbatch != task.microbatch
    ):
        return
    inputs, popped, used = given
    tensors = [*inputs, *popped.values(), *used.values()]
    task.names = len(inputs), list(popped), list(used)
    task.shape = getattr(module, "chain_shape", 0)
    task.dropout_key = getattr(getattr(module, "adapter_dropout", None), "key", None)
    task.given, task.wants = [_kept(t) for t in tensors], [t.requires_grad for t in tensors]
    seen.results = {i: _kept(result) for i, result in enumerate(results)}
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad and not any(result is tensor for result in results):
            task.compared.append(i)
            tensor.register_hook(partial(_take, seen.gradients, i))
    for i, result in enumerate(results):
        if result.requires_grad and not any(result is tensor for tensor in tensors):
            result.register_hook(partial(_take, task.returned, i))


def _take(taken: dict[int, Tensor], place: int, gradient: Tensor) -> None:
    taken[place] = _kept(gradient)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """True if all bits are equal, also those of NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return bool(ours.reshape(-1).view(torch.uint8).equal(theirs.reshape(-1).view(torch.uint8)))


def _kept(tensor: Tensor) -> Tensor:
    """Copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _send(what: Any, rank: int, group: dist.ProcessGroup) -> None:
    dist.send_object_list([what], dist.get_global_rank(group, rank), group)


def _received(rank: int, group: dist.ProcessGroup) -> Any:
    found: list[Any] = [None]
    dist.recv_object_list(found, dist.get_global_rank(group, rank), group)
    return found[0]
