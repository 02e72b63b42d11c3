"""Context-parallel ranks beside one process, for derived chains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.tracing.context_parallel.collectives import gather
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from megatron_pulse.tracing.derived_layer import DerivedLayer
from tests.runtime.equality import Case
from tests.tracing.subject import Subject


@dataclass
class Compared:
    """Largest differences of one chain on several ranks, relative to the largest value.

    ``sent`` is the mean number of bytes that a rank sent forward and backward, ``predicted`` that
    of the formula.
    """

    output: float
    gradients: dict[str, float]
    sent: tuple[float, float]
    predicted: tuple[float, float]


def compare(
    chains: Sequence[tuple[str, str]], token_slices: int = 1
) -> dict[tuple[str, str], Compared]:
    """Compare each chain, by name and dtype, on all ranks with one process (on every rank).

    Token-wise regions of ranks run in ``token_slices`` slices, those of the process whole.
    """
    dist.init_process_group("gloo")
    return {at: _compare(Subject(*at), token_slices) for at in chains}


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


def _compare(subject: Subject, token_slices: int) -> Compared:
    """Compare a chain on a batch of each of its shapes, whose gradients are summed."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    whole, divided = subject.chain, divide_context(subject.chain, rank, size)
    of_whole, of_divided = build_layers(whole, None), build_layers(divided, group)
    assert set_token_slices(of_divided, token_slices)
    if token_slices > 1:
        assert any(map(_has_regions, of_divided))
    output, bytes_sent, predicted = 0.0, [0, 0], [0.0, 0.0]
    case = Case("sequential", whole.num_shapes)
    for shape_index, batch in enumerate(subject.batches(case, 0)):
        target = batch["target"]
        with counted() as sent:
            found = run_layers(divided, of_divided, batch, shape_index)
            bytes_sent[0] += (forward := sum(sent))
            ((found - target).square().mean() / size).backward()
            bytes_sent[1] += sum(sent) - forward
        wanted = run_layers(whole, of_whole, batch, shape_index)
        (wanted - target).square().mean().backward()
        output = max(output, float((found - wanted).abs().max() / wanted.abs().max()))
        for each, way in itertools.product(traffic_of(whole, size, shape_index), (0, 1)):
            predicted[way] += len(target) * each.sent_per_rank(size, backward=bool(way))
    total = torch.tensor(bytes_sent, dtype=torch.float64)
    dist.all_reduce(total)
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
    forward, backward = (total / size).tolist()
    return Compared(output, gradients, (forward, backward), (predicted[0], predicted[1]))


def _has_regions(layer: nn.Module) -> bool:
    """True if parts of a derived layer run in slices."""
    assert isinstance(layer, DerivedLayer)
    return bool(layer._sliced(layer._source.chains.first)[1])


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank sends to others in each all-to-all."""
    exchange, sent = dist.all_to_all_single, list[int]()

    def count(
        out: Tensor, given: Tensor, get: list[int], give: list[int], group: Any, **how: Any
    ) -> Any:
        others = sum(give) - give[group.rank()]
        sent.append(others * given[0].nbytes if others else 0)
        return exchange(out, given, get, give, group=group, **how)

    dist.all_to_all_single = count  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_to_all_single = exchange


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
