"""Context-parallel ranks beside one process, for derived chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from tests.runtime.equality import Case
from tests.tracing.subject import Subject

CASE = Case("sequential", 1)


@dataclass
class Compared:
    """Largest differences of one chain on several ranks, relative to the largest value.

    ``sent`` is the mean number of bytes that a rank sent in a forward pass, ``predicted`` that
    of the formula.
    """

    output: float
    gradients: dict[str, float]
    sent: float
    predicted: float


def compare(chains: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Compared]:
    """Compare each chain, by name and dtype, on all ranks with one process (on every rank)."""
    dist.init_process_group("gloo")
    return {at: _compare(Subject(*at)) for at in chains}


def _compare(subject: Subject) -> Compared:
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    batch, whole = subject.batches(CASE, 1)[0], subject.chain
    wanted, of_whole = _run(whole, None, batch)
    traffic = traffic_of(whole, size)
    divided = divide_context(whole, rank, size)
    sent = 0

    def count(out: Tensor, given: Tensor, get: list[int], give: list[int], group: Any) -> None:
        nonlocal sent
        sent += (sum(give) - give[rank]) * given[0].nbytes
        exchange(out, given, get, give, group=group)

    exchange, dist.all_to_all_single = dist.all_to_all_single, count  # type: ignore[assignment]
    found, of_divided = _run(divided, group, batch)
    forward = torch.tensor(float(sent))
    dist.all_reduce(forward)
    ((found - batch["target"]).square().mean() / size).backward()
    dist.all_to_all_single = exchange
    (wanted - batch["target"]).square().mean().backward()
    gradients, parameters = {}, dict(of_whole.named_parameters())
    top = max(p.grad.abs().max() for p in parameters.values() if p.grad is not None)
    for name, parameter in of_divided.named_parameters():
        expected = parameters[name].grad
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        got = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
        dist.all_reduce(got)
        least = expected.abs().max().clamp(min=1e-3 * top)  # a key's bias has none but rounding
        gradients[name] = float((got - expected).abs().max() / least)
    batch_size = len(batch["target"])
    predicted = batch_size * sum(each.sent_per_rank(size) for each in traffic)
    output = float((found - wanted).abs().max() / wanted.abs().max())
    return Compared(output, gradients, float(forward) / size, predicted)


def _run(backbone: Backbone, group: Any, batch: dict[str, Tensor]) -> tuple[Tensor, nn.ModuleList]:
    """Prediction of all layers in turn, whose boundaries have the backbone's shapes."""
    config: Any = SimpleNamespace(perform_initialization=True)
    context = LayerContext(config, SimpleNamespace(cp=group, tp=None))  # type: ignore[arg-type]
    modules = nn.ModuleList(layer.build(context) for layer in backbone.layers)
    values, skips, conditioning = (batch["noisy"],), dict[str, Tensor](), dict(batch)
    samples = len(batch["target"])
    for layer, module in zip(backbone.layers, modules, strict=True):
        used = {name: conditioning[name] for name in layer.uses}
        results = module(values, {name: skips.pop(name) for name in layer.pops}, used)
        specs = (*layer.outputs, *layer.provides.values())
        for spec, result in zip(specs, results, strict=True):
            assert tuple(result.shape) == spec.full_shape(samples), layer.name
        values = results[: len(layer.outputs)]
        skips.update((name, values[index]) for name, index in layer.pushes.items())
        conditioning.update(zip(layer.provides, results[len(layer.outputs) :], strict=True))
    return values[0], modules
