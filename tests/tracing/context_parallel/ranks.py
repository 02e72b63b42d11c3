"""Context-parallel ranks beside one process, for derived chains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.tracing.context_parallel.collectives import gather
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from tests.runtime.equality import Case
from tests.tracing.subject import Subject


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


def wait_alone() -> str:
    """Error of an exchange that only the first rank makes; empty on the other."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    group = dist.group.WORLD
    assert group is not None
    if group.rank():
        time.sleep(6)
        return ""
    try:
        gather(torch.ones(3), 0, (3, 3), group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _compare(subject: Subject) -> Compared:
    """Compare a chain on a batch of each of its shapes, whose gradients are summed."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    whole, divided = subject.chain, divide_context(subject.chain, rank, size)
    of_whole, of_divided = build_layers(whole, None), build_layers(divided, group)
    exchange, sent, output, predicted = dist.all_to_all_single, 0, 0.0, 0.0

    def count(out: Tensor, given: Tensor, get: list[int], give: list[int], group: Any) -> None:
        nonlocal sent
        sent += (sum(give) - give[rank]) * given[0].nbytes
        exchange(out, given, get, give, group=group)

    case = Case("sequential", whole.num_shapes)
    for shape_index, batch in enumerate(subject.batches(case, 0)):
        dist.all_to_all_single = count  # type: ignore[assignment]
        found = run_layers(divided, of_divided, batch, shape_index)
        dist.all_to_all_single = exchange
        wanted, target = run_layers(whole, of_whole, batch, shape_index), batch["target"]
        ((found - target).square().mean() / size).backward()
        (wanted - target).square().mean().backward()
        output = max(output, float((found - wanted).abs().max() / wanted.abs().max()))
        traffic = traffic_of(whole, size, shape_index)
        predicted += len(target) * sum(each.sent_per_rank(size) for each in traffic)
    forward = torch.tensor(float(sent))
    dist.all_reduce(forward)
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
    return Compared(output, gradients, float(forward) / size, predicted)


def build_layers(backbone: Backbone, group: Any) -> nn.ModuleList:
    """All layers of a rank."""
    config: Any = SimpleNamespace(perform_initialization=True)
    context = LayerContext(config, SimpleNamespace(cp=group, tp=None))  # type: ignore[arg-type]
    return nn.ModuleList(layer.build(context) for layer in backbone.layers)


def run_layers(
    backbone: Backbone, modules: nn.ModuleList, batch: dict[str, Tensor], shape_index: int
) -> Tensor:
    """Prediction of all layers in turn, whose boundaries have the backbone's shapes."""
    values, skips, conditioning = (batch["noisy"],), dict[str, Tensor](), dict(batch)
    samples = len(batch["target"])
    for layer, module in zip(backbone.layers, modules, strict=True):
        module.chain_shape = shape_index
        used = {name: conditioning[name] for name in layer.uses}
        results = module(values, {name: skips.pop(name) for name in layer.pops}, used)
        specs = (*layer.outputs, *layer.provides.values())
        for spec, result in zip(specs, results, strict=True):
            expected = spec.at(shape_index).full_shape(samples)
            assert tuple(result.shape) == expected, layer.name
        values = results[: len(layer.outputs)]
        skips.update((name, values[index]) for name, index in layer.pushes.items())
        conditioning.update(zip(layer.provides, results[len(layer.outputs) :], strict=True))
    return values[0]
