"""Search for the microbatch with a loss or gradients that are not finite.

Losses are checked in every step. For gradients only the norm of their sum is known, at no cost. If
the norm is not finite, no weight has changed yet. The step is then repeated with the same samples
and noise, and the gradients of each operation are checked and discarded.

Under a loss scale such steps are skipped, and the scale is lowered. If the scale cannot be lowered,
several skipped steps in a row end the run. The last of them is repeated at scale 1, which separates
non-finite gradients from overflow caused by the scale.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_pulse.encoders.finite import CHECK
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.planner.program.device_program import Event, Run
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.watchdog.progress import PROGRESS

SUM_TOO_LARGE = (
    "each microbatch's own gradients are finite, so their sum overflows, or a device is faulty"
)
_MOST = 4
_ROUNDING = 1e-6
"""Relative rounding error of a flag's value in fp32."""
_BACKWARDS = (OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)


def losses_not_finite(
    names: Sequence[str],
    losses: Mapping[int, Sequence[float]],
    replica: int,
    encoders: Sequence[str] = (),
) -> str:
    """Message on the non-finite losses (collective); each device knows its own, by chain.

    ``encoders`` are faults of encoders in the loop, which then are the cause.
    """
    own = [
        f"the {names[chain]} of microbatch {number} is {loss}"
        + f" in replica {replica} (rank {dist.get_rank()})"
        for chain, of_chain in losses.items()
        for number, loss in enumerate(of_chain)
        if not math.isfinite(loss)
    ]
    found = dict.fromkeys(text for of_rank in gather_objects(own) for text in of_rank)
    amiss = dict.fromkeys(text for of_rank in gather_objects(list(encoders)) for text in of_rank)
    if amiss:
        return f"{_listed(found)}: {_listed(amiss)}. {CHECK}"
    return f"{_listed(found)}: lower --lr, check the data, or use --bf16 instead of --fp16"


class GradientCheck:
    """Recorder that checks and discards the gradients of each operation on this device."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._stages = {number: unwrap(chunk) for number, chunk in stages.items()}
        self._broken: dict[int, tuple[int, str]] = {}
        for stage in self._stages.values():
            _forget(stage.parameters())

    def begin(self, event: Event) -> None:
        """Do nothing."""

    def end(self, event: Event) -> None:
        """Check the gradients after a backward."""
        if isinstance(event, Run) and event.operation.kind in _BACKWARDS:
            self._look(event.operation)

    def _look(self, op: Operation) -> None:
        layers = self._stages[op.stage].named_layers()
        broken = [name for name, layer in layers if not _all_finite(layer.parameters())]
        _forget(self._stages[op.stage].parameters())
        if broken:  # backward runs in reverse: the last broken layer is the origin
            last = op.stage, broken[-1]
            self._broken[op.microbatch] = max(self._broken.get(op.microbatch, last), last)

    def found(self, replica: int | None) -> str:
        """Microbatches with non-finite gradients, and the layer where they begin (collective).

        ``replica`` is None if gradients are those of all replicas.
        Empty if the gradients of each microbatch alone are finite.
        """
        told = gather_objects((replica, dist.get_rank(), self._broken))
        first: dict[tuple[int, int], tuple[int, str, int]] = {}
        whole = replica is None
        for of_replica, rank, broken in told:
            for microbatch, (stage, layer) in broken.items():
                key, origin = (microbatch, of_replica or 0), (stage, layer, rank)
                first[key] = max(first.get(key, origin), origin, key=lambda one: one[0])
        return _listed(
            f"those of microbatch {microbatch} in "
            + ("some replica" if whole else f"replica {of_replica} (rank {rank})")
            + f" are not finite from layer {layer} down"
            for (microbatch, of_replica), (_, layer, rank) in sorted(first.items())
        )


class SkippedSteps:
    """Counter of consecutive steps skipped at a loss scale that cannot be lowered further.

    ``limit`` of them end the run. ``find`` repeats the last step at a loss scale (None: the current
    one) and names the origin of non-finite gradients. Its result is empty if the gradients of each
    microbatch alone are finite.
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
        """Raise PulseError if ``step`` reached the limit of skipped steps (collective if skipped).

        ``scales`` are those of this rank's optimizers in the step; empty if nothing is trained.
        """
        if not skipped:
            self._count = 0
            return
        scale = _least_of_ranks(scales)
        self._count = self._count + 1 if scale <= self._least * (1 + _ROUNDING) else 0
        if self._count >= self._limit:
            with PROGRESS.during(f"repeating step {step} to locate its non-finite gradients"):
                whose = self._find(min(scale, 1.0))
            raise PulseError(self._told(step, scale, whose))

    def _told(self, step: int, scale: float, whose: str) -> str:
        last = (
            f"{self._count} consecutive step(s) were skipped: the gradients of the last, step "
            f"{step},"
        )
        if whose or scale <= 1:
            return (
                f"{last} are not finite at loss scale {min(scale, 1.0):g} either, although its "
                f"losses are finite: {whose or SUM_TOO_LARGE}. Lower --lr, check the backbone, or "
                "use --bf16 instead of --fp16 (--no-check-for-nan-in-loss-and-grad continues "
                "regardless)"
            )
        which, remedy = (
            (
                "fixed by --loss-scale",
                "lower --loss-scale, or leave it out for a dynamic loss scale",
            )
            if self._fixed
            else ("the minimum of --min-loss-scale", "lower --min-loss-scale")
        )
        return (
            f"{last} overflow at loss scale {scale:g}, {which}, and are finite at scale 1: {remedy}"
        )


def _least_of_ranks(scales: Sequence[Tensor]) -> float:
    """Minimum of all ranks' ``scales`` (collective); scales of one step are equal."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    least = torch.full((1,), math.inf, device=device)
    for scale in scales:
        least = torch.minimum(least, scale)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Buffers in which Megatron accumulates gradients, or rows of sharded gradients."""
    trained = [p for p in parameters if p.requires_grad]
    if not any(isinstance(p, DTensor) for p in trained):
        return [p.main_grad for p in trained]
    return [p.grad.to_local() for p in trained if isinstance(p.grad, DTensor)]


def _all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in _gradients(parameters))


def _forget(parameters: Iterable[nn.Parameter]) -> None:
    if gradients := _gradients(parameters):
        torch._foreach_zero_(gradients)


def _listed(found: Iterable[str]) -> str:
    texts = list(found)
    more = f" and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more
