"""Inputs and parts of a module have the names that its writer gave them, whatever these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing.own import WIDTH


class Called(nn.Sequential):
    def forward(self, Time: Tensor, X: Tensor, Cond: dict[str, Tensor], Table: Tensor) -> Tensor:
        y = Cond["a b"] - Cond["E"] * Time[:, None]
        return super().forward(X + y) * Table.sum(0)


def test_inputs_have_the_names_of_the_caller() -> None:
    torch.manual_seed(0)
    module = Called(nn.Linear(WIDTH, WIDTH))
    x, time, table = torch.randn(2, WIDTH), torch.rand(2), torch.rand(2, WIDTH)
    cond = {"E": torch.randn(2, WIDTH), "a b": torch.randn(2, WIDTH)}
    chain = pulse.from_module(
        module,
        {"X": x, "Table": table, "Cond": cond, "Time": 2 * time},
        sample="X",
        timestep="Time",
        timestep_scale=2.0,
        constants=["Table"],
        fields={"Cond_E": "text"},
    )
    assert set(chain.batch_fields) == {"timesteps", "text", "Cond_a b"}
    (layer,) = chain.layers
    batch = {"timesteps": time, "text": cond["E"], "Cond_a b": cond["a b"]}
    (found,) = layer.build(None)((x,), {}, batch)
    assert torch.equal(found, module(2 * time, x, cond, table))


class Colliding(nn.Sequential):
    def forward(self, x: Tensor, c_y: Tensor, c: dict[str, Tensor]) -> Tensor:
        return super().forward(x) + c_y + 2 * c["y"]


@pytest.mark.parametrize(
    "given, constants, said",
    [
        ({"c_y": 2, "c": {"y": 2}}, (), "c_y and c['y'] would both be called c_y"),
        ({"c_y": 2, "c": {"z": 2}}, ("x",), "x is the noisy sample, which cannot be a constant"),
        ({"c_y": 2, "c": {"z": 2}}, ("C",), "constants C: not among its inputs"),
    ],
)
def test_names_that_do_not_tell_inputs_apart(
    given: dict[str, Any], constants: tuple[str, ...], said: str
) -> None:
    example = torch.utils._pytree.tree_map(lambda n: torch.randn(n, WIDTH), {"x": 2, **given})
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(
            Colliding(nn.Linear(WIDTH, WIDTH)), example, sample="x", constants=constants
        )
    assert said in str(caught.value)


def test_a_constant_is_no_prefix_of_other_inputs() -> None:
    given = {"x": torch.randn(2, WIDTH), "c_y": torch.randn(2, WIDTH), "c": {"y_": torch.ones(1)}}

    class Apart(nn.Sequential):
        def forward(self, x: Tensor, c_y: Tensor, c: dict[str, Tensor]) -> Tensor:
            return super().forward(x) + c_y * c["y_"]

    chain = pulse.from_module(Apart(nn.Linear(WIDTH, WIDTH)), given, sample="x", constants=["c"])
    assert set(chain.batch_fields) == {"c_y"}


class Parts(nn.Module):
    """Its parts are called as attributes of what holds them in a pipeline."""

    NAMES = ("_unit", "_before", "stage", "replicas", "_chain")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self._source = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = self._modules[name](x).sin()  # type: ignore[misc]
        return x * self._source


def test_parts_of_any_name_are_trained() -> None:
    torch.manual_seed(0)
    module, x = Parts(), torch.randn(2, WIDTH)
    expected = module(x).square().mean()
    expected.backward()
    chain = pulse.from_module(module, {"x": x}, sample="x")
    costs = pulse.weighted_costs(chain, [1.0] * len(chain.layers))
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    pipeline = pulse.Pipeline(plan, lambda y, _: y.square().mean(), 2)
    (loss,) = pipeline.step([{"noisy": x}])
    assert loss.item() == expected.item()
    found = dict(pipeline.named_parameters())
    assert found.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and found[name].grad is not None
        assert torch.equal(parameter.grad, found[name].grad), name
