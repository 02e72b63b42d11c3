"""Validation loss as in MLPerf's text-to-image benchmark: the mean of its means by time.

Every sample has one fixed noise, and the time of its position in the evaluation. Losses of single
samples are collected from all replicas and put in their order. The sums thus do not depend on
layout or microbatch size. The trained weights are evaluated, as in that benchmark, not their EMA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pulse.diffusion.objectives import VALIDATION_TIMES
from megatron_pulse.runtime.tensor_settings import Batch, LossFunction


class ValidationLosses:
    """Validation losses of a run, of one chain or of a cascade's chains by name.

    ``losses`` return the losses of a microbatch's samples, and ``sizes`` are the numbers of
    positions that count. ``target`` is the loss at which the run ends.
    """

    def __init__(
        self,
        losses: LossFunction | Mapping[str, LossFunction],
        sizes: int | Mapping[str, int],
        target: float | None = None,
    ) -> None:
        self._losses = losses if isinstance(losses, Mapping) else {"": losses}
        self._sizes = sizes if isinstance(sizes, Mapping) else {"": sizes}
        self._target = target
        self._kept: dict[str, list[Tensor]] = {}
        self._values: dict[str, Tensor] = {}
        self._begin()
        self.reached: float | None = None
        """Loss that is at most the target; None before."""

    def describe_reached(self) -> str:
        """Description of the loss that reached the target."""
        return f"validation loss {self.reached:.6g} reached the target {self._target:g}"

    def keeping(self) -> LossFunction | Mapping[str, LossFunction]:
        """Loss functions of an evaluation's batch, which keep the losses of samples."""
        self._kept = {chain: [] for chain in self._losses}
        functions = {chain: partial(self._keep, chain) for chain in self._losses}
        return functions.get("", functions)

    def _keep(self, chain: str, prediction: Tensor, batch: Batch) -> Tensor:
        losses = self._losses[chain](prediction, batch)
        positions = batch["positions"].to(losses.device, torch.float64, non_blocking=True)
        self._kept[chain].append(torch.stack([positions, losses.double()]))
        return losses.mean()

    def share(
        self, owners: Mapping[str, int], groups: Any, num_samples: int, device: torch.device
    ) -> None:
        """Collect the losses of a batch on all ranks (collective).

        ``owners`` are the pipeline devices where chains end; a replica has ``num_samples``.
        """
        for chain, owner in owners.items():
            found = torch.empty(
                (groups.dp_cp.size() * 2, num_samples), dtype=torch.float64, device=device
            )
            if owner == groups.pp.rank():
                own = torch.cat(self._kept[chain], dim=1)
                dist.all_gather_into_tensor(found, own, group=groups.dp_cp)
            if groups.pp.size() > 1:
                source = dist.get_global_rank(groups.pp, owner)
                dist.broadcast(found, src=source, group=groups.pp)
            self._add(chain, *found.cpu().view(-1, 2, num_samples).unbind(1))

    def _add(self, chain: str, positions: Tensor, losses: Tensor) -> None:
        counts = positions < self._sizes[chain]
        self._values[chain][positions[counts].long()] = losses[counts]

    def _begin(self) -> None:
        self._values = {
            chain: torch.full((size,), torch.nan, dtype=torch.float64)
            for chain, size in self._sizes.items()
        }

    def result(self) -> dict[str, Tensor]:
        """Losses by name: the mean of the means by time, and these."""
        found: dict[str, Tensor] = {}
        for chain, values in self._values.items():
            name = f"{chain} loss".strip()
            by_time = {
                f"{name} at {i / VALIDATION_TIMES:g}": own[~own.isnan()].mean()
                for i in range(VALIDATION_TIMES)
                if not (own := values[i::VALIDATION_TIMES]).isnan().all()
            }
            found |= {name: torch.stack([*by_time.values()]).mean(), **by_time}
        return found

    def wrap_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's ``evaluate`` to return these losses on all ranks.

        Raises whatever it raises. An evaluation that a time limit ends has no losses.
        """

        def run(*given: Any, **named: Any) -> Any:
            self._begin()
            losses, other, timed_out = evaluate(*given, **named)
            if timed_out:
                return losses, other, timed_out
            found = self.result()
            self._compare(found)
            return found, other, timed_out

        return run

    def _compare(self, found: Mapping[str, Tensor]) -> None:
        if self._target is None:
            return
        # Tensor-parallel ranks may differ in the last bits, so one rank decides.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loss = found["loss"].to(device)
        dist.broadcast(loss, src=0)
        if loss.item() <= self._target:
            self.reached = loss.item()
