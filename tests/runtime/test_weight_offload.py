"""Weight offload: frozen weights in host memory change no bit, and are not kept on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import megatron_pulse as pulse
from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.runtime.parameters.weight_offload import WeightOffload
from tests.ranks import run_ranks
from tests.runtime.equality import (
    Case,
    Outcome,
    differences,
    mean_squared_error,
    merge,
    references,
    train_split,
)
from tests.runtime.test_adapters import FOLD, SEQUENTIAL, chain

CPU = torch.device("cpu")
CASES: list[tuple[Case, int | None]] = [
    (replace(FOLD, offload_weights=1), 1),
    (replace(SEQUENTIAL, offload_weights=1, recompute=2), None),
    (replace(FOLD, offload_weights=2), None),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""


def run_cases(cases: list[tuple[Case, int | None]]) -> list[Outcome]:
    return train_split(chain, cases, 2)


def test_it_changes_no_bit() -> None:
    expected = references(run_cases, [(case.alone, None) for case, _ in CASES])
    for ranks, cases in (
        (run_ranks(1, run_cases, CASES[1:2]), CASES[1:2]),
        (run_ranks(2, run_cases, CASES), CASES),
    ):
        for i, (case, _) in enumerate(cases):
            got = merge([outcomes[i] for outcomes in ranks])
            reference = expected[CASES.index(cases[i])]
            assert got.losses == reference.losses, case
            assert not differences(got.gradients, reference.gradients), case
            assert not differences(got.parameters, reference.parameters), case


def linears(count: int) -> list[nn.Sequential]:
    """Layers with frozen weights of 64 KiB and a trained bias."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(count)]
    for layer in layers:
        layer[0].weight.requires_grad_(False)
    return layers


def test_at_most_two_layers_are_on_the_device_and_none_between_passes() -> None:
    layers, offload = linears(5), WeightOffload()
    for i, layer in enumerate(layers):
        offload.add(str(i), layer)
    copies: list[tuple[int, ...]] = []

    def held() -> None:
        copies.append(tuple(offload._copies))

    x = torch.randn(3, 128, requires_grad=True)
    y = x
    for i, layer in enumerate(layers):
        name = str(i)
        with offload.saving(name, CPU), offload.on_device(name, CPU):
            y = layer(y)
            held()
    assert copies == [(0, 1), (1, 2), (2, 3), (3, 4), (4,)]
    offload.release()
    held()
    copies.clear()
    y.register_hook(lambda _: held())
    y.sum().backward()
    assert copies == [()] and tuple(offload._copies) == (0,)  # 0's input is taken from the right
    offload.release()
    assert not offload._copies and offload.num_bytes == 5 * 4 * 128 * 128


def test_weights_are_cast_on_the_host_and_do_not_move() -> None:
    (layer,), offload = linears(1), WeightOffload()
    values, seen = layer[0].weight.detach().clone(), []
    offload.add("layer", layer)
    with offload.hidden():
        layer._apply(lambda tensor: [seen.append(tensor.numel()), tensor.bfloat16()][1])
    assert seen == [0, 128]
    assert torch.equal(layer[0].weight, values.bfloat16())
    assert offload.num_bytes == 2 * 128 * 128


def test_a_write_into_another_saved_tensor_is_refused() -> None:
    (layer,), offload = linears(1), WeightOffload()
    offload.add("layer", layer)
    with offload.saving("layer", CPU), offload.on_device("layer", CPU):
        result = layer(torch.randn(2, 128, requires_grad=True))
    result.data.mul_(1)  # not counted
    result.backward(torch.ones_like(result), retain_graph=True)
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(Exception, match="layer.*in place|modified"):
        result.backward(torch.ones_like(result))


def test_it_is_beside_kept_and_fully_recomputed_activations_alone() -> None:
    backbone = chain()
    costs = pulse.weighted_costs(backbone, [1.0] * len(backbone.layers))
    plan = pulse.make_plan(backbone, costs, pulse.sequential(1))
    every: Any = frozenset(range(len(backbone.layers)))
    made = replace(plan, offloaded_weights=every, activations=ActivationPolicies(every))
    pipeline = pulse.Pipeline(made, mean_squared_error, 2)
    held = sum(p.numel() for p in pipeline.parameters() if not p.requires_grad)
    (stage,) = pipeline.stages.values()
    assert stage.weight_offload.num_bytes >= 4 * held
    for policies in (ActivationPolicies(offload={1}), ActivationPolicies(selective={1})):
        with pytest.raises(PlanError, match="layers 1 offload their weights, and offload or"):
            replace(plan, offloaded_weights=frozenset({1}), activations=policies)
