"""Which microbatch has a loss or gradients that are not finite.

Losses are looked at in every step. Of gradients only the norm of their sum is known, which costs
nothing: where that is not finite, no weight has been changed yet, and the step is made once more,
with the same samples and noise. Then each operation's gradients are looked at, and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.planner.schedule.operations import Kind, Operation
from megatron_pulse.planner.step.program import Event, Run

_MOST = 4
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def losses_not_finite(
    names: Sequence[str], losses: Mapping[int, Sequence[float]], replica: int
) -> str:
    """Which losses are not finite (collective): each device knows its own, by chain."""
    own = [
        f"the {names[chain]} of microbatch {number} is {loss}"
        + f" in replica {replica} (rank {dist.get_rank()})"
        for chain, of_chain in losses.items()
        for number, loss in enumerate(of_chain)
        if not math.isfinite(loss)
    ]
    found = dict.fromkeys(text for of_rank in _gathered(own) for text in of_rank)
    return f"{_listed(found)}: lower --lr, check the data, or use --bf16 instead of --fp16"


class GradientCheck:
    """A recorder: looks at the gradients that each operation leaves in the ``stages`` of this
    device, and takes them away."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._stages = {number: unwrap(chunk) for number, chunk in stages.items()}
        self._broken: dict[int, tuple[int, str]] = {}
        for stage in self._stages.values():
            _forget(stage.parameters())

    def begin(self, event: Event) -> None:
        """Nothing."""

    def end(self, event: Event) -> None:
        """Look, where a backward has ended."""
        if isinstance(event, Run) and event.operation.kind in _BACKWARDS:
            self._look(event.operation)

    def _look(self, op: Operation) -> None:
        layers = self._stages[op.stage].named_layers()
        broken = [name for name, layer in layers if not _all_finite(layer.parameters())]
        _forget(self._stages[op.stage].parameters())
        if broken:  # gradients come from behind
            last = op.stage, broken[-1]
            self._broken[op.microbatch] = max(self._broken.get(op.microbatch, last), last)

    def found(self, replica: int) -> str:
        """Whose gradients are not finite (collective), and from which layer on."""
        told = _gathered((replica, dist.get_rank(), self._broken))
        first: dict[tuple[int, int], tuple[int, str, int]] = {}
        for of_replica, rank, broken in told:
            for microbatch, (stage, layer) in broken.items():
                key, origin = (microbatch, of_replica), (stage, layer, rank)
                first[key] = max(first.get(key, origin), origin, key=lambda one: one[0])
        if not first:
            return (
                "each microbatch's alone are finite, so their sum is too large, or a device has "
                "computed wrongly"
            )
        return _listed(
            f"those of microbatch {microbatch} in replica {of_replica} from layer {layer} backwards"
            f" (rank {rank})"
            for (microbatch, of_replica), (_, layer, rank) in sorted(first.items())
        )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Where Megatron accumulates them."""
    return [p.main_grad for p in parameters if p.requires_grad]


def _all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in _gradients(parameters))


def _forget(parameters: Iterable[nn.Parameter]) -> None:
    if gradients := _gradients(parameters):
        torch._foreach_zero_(gradients)


def _gathered[T](own: T) -> list[T]:
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _listed(found: Iterable[str]) -> str:
    texts = list(found)
    more = f" and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more
