"""Which microbatch has a loss or gradients that are not finite.

Losses are looked at in every step. Of gradients only the norm of their sum is known, which costs
nothing: where that is not finite, no weight has been changed yet, and the step is made once more,
with the same samples and noise. Then each operation's gradients are looked at, and forgotten.

Under a loss scale such steps are skipped, and the scale is lowered. Where it cannot be, some
skipped steps in a row end the run as well: the last is made once more at scale 1, which tells
gradients that are not finite from a scale that makes them so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.encoders.finite import CHECK
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.planner.schedule.operations import Kind, Operation
from megatron_pulse.planner.step.program import Event, Run
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.watch.place import HERE

SUM_TOO_LARGE = (
    "each microbatch's alone are finite: their sum is too large, or a device is at fault"
)
_MOST = 4
_ROUNDING = 1e-6
"""Between a flag and what fp32 makes of it."""
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def losses_not_finite(
    names: Sequence[str],
    losses: Mapping[int, Sequence[float]],
    replica: int,
    encoders: Sequence[str] = (),
) -> str:
    """Which losses are not finite (collective): each device knows its own, by chain; ``encoders``
    are faults of those in the loop, which then are the cause."""
    own = [
        f"the {names[chain]} of microbatch {number} is {loss}"
        + f" in replica {replica} (rank {dist.get_rank()})"
        for chain, of_chain in losses.items()
        for number, loss in enumerate(of_chain)
        if not math.isfinite(loss)
    ]
    found = dict.fromkeys(text for of_rank in _gathered(own) for text in of_rank)
    amiss = dict.fromkeys(text for of_rank in _gathered(list(encoders)) for text in of_rank)
    if amiss:
        return f"{_listed(found)}: {_listed(amiss)}. {CHECK}"
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
        """Whose gradients are not finite (collective), and from which layer on; empty where each
        microbatch's alone are."""
        told = _gathered((replica, dist.get_rank(), self._broken))
        first: dict[tuple[int, int], tuple[int, str, int]] = {}
        for of_replica, rank, broken in told:
            for microbatch, (stage, layer) in broken.items():
                key, origin = (microbatch, of_replica), (stage, layer, rank)
                first[key] = max(first.get(key, origin), origin, key=lambda one: one[0])
        return _listed(
            f"those of microbatch {microbatch} in replica {of_replica} from layer {layer} backwards"
            f" (rank {rank})"
            for (microbatch, of_replica), (_, layer, rank) in sorted(first.items())
        )


class SkippedSteps:
    """Counts the steps in a row that were skipped at a loss scale that is not lowered any more.

    ``limit`` of them end the run. ``find`` makes the last step once more at a loss scale (None: as
    it is), and says whose gradients are not finite; empty where each microbatch's alone are.
    """

    def __init__(
        self, args: argparse.Namespace, limit: int, find: Callable[[float | None], str]
    ) -> None:
        self._fixed = bool(args.loss_scale)
        self._least = args.loss_scale if self._fixed else args.min_loss_scale
        self._limit = limit
        self._find = find
        self._count = 0

    def look(self, step: int, skipped: bool, scales: Sequence[Tensor]) -> None:
        """Raise PulseError where ``step`` was the last to be skipped (collective if it was).

        ``scales`` are those of this rank's optimizers in the step; none where nothing is trained.
        """
        if not skipped:
            self._count = 0
            return
        scale = _least_of_ranks(scales)
        self._count = self._count + 1 if scale <= self._least * (1 + _ROUNDING) else 0
        if self._count >= self._limit:
            with HERE.during(f"making step {step} again, whose gradients are not finite"):
                whose = self._find(min(scale, 1.0))
            raise PulseError(self._told(step, scale, whose))

    def _told(self, step: int, scale: float, whose: str) -> str:
        last = (
            f"{self._count} step(s) in a row were skipped: the gradients of the last, step {step},"
        )
        if whose or scale <= 1:
            return (
                f"{last} are not finite at loss scale {min(scale, 1.0):g} either, though its "
                f"losses are: {whose or SUM_TOO_LARGE}: lower --lr, check the backbone, or use "
                "--bf16 instead of --fp16 (--no-check-for-nan-in-loss-and-grad goes on all the "
                "same)"
            )
        which, remedy = (
            ("fixed by --loss-scale", "lower --loss-scale, or leave it out and it is found")
            if self._fixed
            else ("the least by --min-loss-scale", "lower --min-loss-scale")
        )
        return (
            f"{last} overflow at loss scale {scale:g}, {which}, and are finite at scale 1: {remedy}"
        )


def _least_of_ranks(scales: Sequence[Tensor]) -> float:
    """The least of all ranks' ``scales`` (collective); those of one step are the same."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    least = torch.full((1,), math.inf, device=device)
    for scale in scales:
        least = torch.minimum(least, scale)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


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
