"""A pass that predicts, and the step that is given its predictions, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import sequential
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.pipeline import Pipeline
from megatron_pulse.runtime.self_conditioning import PredictionCarrier, joined
from megatron_pulse.runtime.tensor_settings import RunSettings
from tests.runtime.equality import mean_squared_error


class Tanh(nn.Linear):
    """A layer of a chain."""

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> Any:
        return (torch.tanh(super().forward(inputs[0])),)


def chain() -> Backbone:
    """Takes two numbers and their prediction, and predicts two."""
    sizes = (4, 3, 2)
    layers = tuple(
        Layer(
            f"layer.{i}",
            lambda context, i=i: Tanh(sizes[i], sizes[i + 1]),
            (TensorSpec((sizes[i],)),),
            (TensorSpec((sizes[i + 1],)),),
        )
        for i in range(2)
    )
    return Backbone("own", layers)


def estimate(prediction: Tensor, batch: Any) -> Tensor:
    """Expected input of the first layer."""
    return batch["noisy"][:, :2] - 2 * prediction


def test_a_step_is_given_what_the_pass_before_predicts() -> None:
    backbone = chain()
    assert backbone.takes_prediction and backbone.sample_spec == TensorSpec((2,))
    plan = make_plan(backbone, weighted_costs(backbone, [1.0, 1.0]), sequential(1))
    pipeline = Pipeline(plan, mean_squared_error, 3, dtype=torch.float64)
    settings = RunSettings(3, torch.float64, torch.device("cpu"), mean_squared_error)
    predictions = PredictionCarrier(backbone, estimate, settings)
    step = plan.step(4, predicts=True)
    executor = Executor(
        backbone, plan.routes, step.schedule, step.programs[0], 0, pipeline.stages, None,
        carrier=predictions,
    )  # fmt: skip
    layers = [stage for _, stage in sorted(pipeline.named_parameters())]
    bias0, weight0, bias1, weight1 = layers

    def model(x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ weight0.T + bias0) @ weight1.T + bias1)

    generator = torch.Generator().manual_seed(0)
    for conditioned in (True, False, True):  # what a step has left is not the next one's
        draw = torch.randn(4, 2, 3, 2, generator=generator, dtype=torch.float64)
        batches = [{"noisy": noisy, "target": target} for noisy, target in draw]
        given = [joined(batch) for batch in batches]
        seen = [torch.cat([batch["noisy"], torch.zeros(3, 2)], 1) for batch in batches]
        if conditioned:
            pretending = replace(settings, loss=predictions.keep)
            executor.run(predictions.of(batches), pretending, forward_only=True)
            given = list(predictions.joined())
            with torch.no_grad():
                made = [estimate(model(x), {"noisy": x}) for x in seen]
            seen = [torch.cat([x[:, :2], y], 1) for x, y in zip(seen, made, strict=True)]
        for parameter in layers:
            parameter.grad = None
        losses = pipeline.step(given)
        got = [parameter.grad for parameter in layers]
        targets = [batch["target"] for batch in batches]
        plain = [(model(x) - y).square().mean() for x, y in zip(seen, targets, strict=True)]
        torch.testing.assert_close(torch.stack(losses), torch.stack(plain).detach())
        expected = torch.autograd.grad(torch.stack(plain).mean(), layers)
        torch.testing.assert_close(got, list(expected))


def test_a_device_without_samples_has_nothing_to_join() -> None:
    batch = {"timesteps": torch.ones(2)}
    assert joined(batch) is batch
    shaped = joined({"noisy": torch.empty(2, 3, 4, 4, device="meta")})["noisy"]
    assert shaped.shape == (2, 6, 4, 4) and shaped.is_meta
