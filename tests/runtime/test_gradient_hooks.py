"""Hooks that layers register on the gradients of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError

WIDTH, SAMPLES = 8, 4
SPEC = pulse.TensorSpec((WIDTH,))


class Hooked(nn.Module):
    """A residual layer that halves gradients: its input's, the skip's, or of a view of them."""

    def __init__(self, on_skip: bool = False, view: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.on_skip, self.view = on_skip, view

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.view:
            x = x.view_as(x)
        hooked = skip if self.on_skip else x
        if hooked is not None and hooked.requires_grad:
            hooked.register_hook(lambda gradient: gradient * 0.5)
        return x + torch.tanh(self.linear(x if skip is None else x + skip))


def pipeline_of(
    make: Callable[[], nn.Module], skips: list[tuple[int, int]], recompute: tuple[int, ...] = ()
) -> pulse.Pipeline:
    chain = pulse.chain([make] * 4, SPEC, skips=skips)
    plan = pulse.make_plan(
        chain,
        pulse.weighted_costs(chain, [1.0] * 4),
        pulse.sequential(1),
        activations=pulse.ActivationPolicies(recompute),
    )
    return pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SAMPLES)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"noisy": torch.randn(SAMPLES, WIDTH, generator=generator)} for _ in range(3)]


def in_plain_torch(pipeline: pulse.Pipeline, make: Callable[[], nn.Module], skips: Any) -> Any:
    """Gradients of a plain loop with the pipeline's weights."""
    modules = nn.ModuleDict({"layers": nn.ModuleList(make() for _ in range(4))})
    modules.load_state_dict(pipeline.state_dict())
    for batch in batches():
        x, results = batch["noisy"], list[Tensor]()
        for i, module in enumerate(modules["layers"]):  # type: ignore[arg-type]
            x = module(x, *(results[a] for a, b in skips if b == i))
            results.append(x)
        (x.square().mean() / 3).backward()
    return {name: parameter.grad for name, parameter in modules.named_parameters()}


@pytest.mark.parametrize("recompute", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize(("view", "skips"), [(False, []), (True, []), (True, [(0, 3), (1, 2)])])
def test_hooks_run_once_as_in_plain_torch(
    view: bool, skips: list[tuple[int, int]], recompute: tuple[int, ...]
) -> None:
    """Also where a layer is recomputed, which registers its hooks again."""

    def make() -> nn.Module:
        return Hooked(view=view)

    pipeline = pipeline_of(make, skips, recompute)
    for _ in range(2):
        pipeline.step(batches())
    expected = in_plain_torch(pipeline, make, skips)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[name])


@pytest.mark.parametrize("recompute", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("on_skip", "fault"),
    [(False, "layers.1 registers a hook .* its input 0"), (True, "layers.3 .* the skip 0 to 3")],
)
def test_hooks_on_a_share_of_a_gradient_are_refused(
    on_skip: bool, fault: str, recompute: tuple[int, ...]
) -> None:
    pipeline = pipeline_of(lambda: Hooked(on_skip), [(0, 3)], recompute)
    pipeline.evaluate(batches())
    with pytest.raises(BackboneError, match=fault):
        pipeline.step(batches())


def test_hooks_on_conditioning_that_layers_share_are_refused() -> None:
    class Embedder(nn.Linear):
        def forward(self, inputs: Any, skips: Any, conditioning: Any) -> Any:
            return (*inputs, super().forward(conditioning["times"]))

    class Reads(nn.Linear):
        def forward(self, inputs: Any, skips: Any, conditioning: Any) -> Any:
            embedding = conditioning["embedding"]
            if embedding.requires_grad:
                embedding.register_hook(lambda gradient: gradient * 0.5)
            return (inputs[0] + super().forward(embedding),)

    def chain_of(count: int) -> pulse.Backbone:
        embed = pulse.Layer(
            "embed",
            lambda context: Embedder(WIDTH, WIDTH),
            (SPEC,),
            (SPEC,),
            provides={"embedding": SPEC},
            uses=("times",),
            embedder=True,
        )
        reads = (
            pulse.Layer(
                f"blocks.{i}",
                lambda context: Reads(WIDTH, WIDTH),
                (SPEC,),
                (SPEC,),
                uses=("embedding",),
            )
            for i in range(count)
        )
        return pulse.Backbone("reads", (embed, *reads), {"times": SPEC})

    for count, refused in ((1, False), (2, True)):
        chain = chain_of(count)
        costs = pulse.weighted_costs(chain, [1.0] * (1 + count))
        plan = pulse.make_plan(chain, costs, pulse.sequential(1))
        pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SAMPLES)
        given = [{**batch, "times": batch["noisy"]} for batch in batches()]
        if not refused:
            pipeline.step(given)
            continue
        with pytest.raises(BackboneError, match="blocks.0 .* the conditioning embedding"):
            pipeline.step(given)
