"""Modules that a chain accepts, and equal results for every partition."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.tracing.torch_export import DerivationError

SMALL = pulse.TensorSpec((4,))


class Joining(nn.Module):
    """A convolution of its input and skips, side by side, shifted by a conditioning."""

    def __init__(self, num_inputs: int, provides: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8 * num_inputs, 8, 3, padding=1)
        self.time = nn.Linear(1, 16) if provides else None

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> tuple[Tensor, ...]:
        made = torch.tanh(self.convolution(torch.cat([*inputs, *skips.values()], 1)))
        if self.time is not None:
            return made, self.time(inputs[0].mean((1, 2, 3))[:, None])
        shift = conditioning["time"][:, ::2].expand(7, 5, -1, -1).permute(2, 3, 1, 0)
        return ((made + shift).transpose(2, 3).contiguous().transpose(2, 3),)


def joining_chain() -> pulse.Backbone:
    """Gradients of its layers' outputs are slices, results are laid out in another order."""
    picture, time = pulse.TensorSpec((8, 5, 7)), pulse.TensorSpec((16,))

    def layer(i: int) -> pulse.Layer:
        return pulse.Layer(
            f"part.{i}",
            lambda context: Joining(2 if i > 3 else 1, i == 0),
            (picture,),
            (picture,),
            pushes={f"skip{i}": 0} if i < 3 else {},
            pops={f"skip{6 - i}": picture} if i > 3 else {},
            provides={} if i else {"time": time},
            uses=("time",) if i else (),
        )

    layers = [*map(layer, range(7))]
    del layers[3]
    return pulse.Backbone("joining", tuple(layers))


def trained(
    placement: Any, weights: list[float], schedule: str, recompute: Sequence[int] = ()
) -> list[Tensor]:
    """Weights and gradients after two steps."""
    chain = joining_chain()
    costs = pulse.weighted_costs(chain, weights)
    plan = pulse.make_plan(
        chain, costs, placement, schedule, activations=pulse.ActivationPolicies(recompute)
    )
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 3)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    for step in range(2):
        seed = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        pipeline.step([{"noisy": torch.randn(3, 8, 5, 7, generator=seed)} for _ in range(3)])
        optimizer.step()
    return [t for p in pipeline.parameters() for t in (p.detach(), p.grad) if t is not None]


EVEN, LATE = [1.0] * 6, [1.0, 1, 1, 1, 1, 9]


def test_the_same_bits_however_a_chain_is_cut() -> None:
    expected = trained(pulse.sequential(1), EVEN, "auto")
    for placement, weights, schedule, recompute in (
        (pulse.fold(1), EVEN, "auto", ()),
        (pulse.fold(1), EVEN, "zb-v", (0, 3)),
        (pulse.interleaved(1, 2), LATE, "auto", ()),
        (pulse.interleaved(1, 6), EVEN, "auto", range(6)),
    ):
        got = trained(placement, weights, schedule, recompute)
        same = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
        assert all(same), (placement, schedule, recompute)


class Mixing(nn.Linear):
    """Adds skips, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, given: Tensor, *skips: Tensor) -> Tensor:
        for i, skip in enumerate(skips):
            given = given + (0.3 + i) * torch.sin(skip)
        return given + torch.tanh(super().forward(given))


@pytest.mark.parametrize("ends", [(2, 4, 6), (3, 7), (1, 2, 3, 7)])
def test_the_same_bits_where_an_output_is_several_skips(ends: tuple[int, ...]) -> None:
    chain = pulse.chain([Mixing] * 8, pulse.TensorSpec((64, 4)), [(0, end) for end in ends])

    def gradients(cuts: tuple[int, ...]) -> list[Tensor | None]:
        num = len(cuts) - 1
        placement = pulse.interleaved(1, num) if num > 1 else pulse.sequential(1)
        plan = pulse.Plan(chain, pulse.Partition(placement, cuts))
        pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2)
        noisy = torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(1))
        pipeline.step([{"noisy": noisy}])
        return [parameter.grad for parameter in pipeline.parameters()]

    expected = gradients((0, 8))
    for cuts in ((0, 1, 8), (0, 2, 8), (0, 3, 8), (0, 1, 4, 5, 8), (0, 1, 2, 3, 6, 8)):
        assert all(map(torch.equal, gradients(cuts), expected)), cuts


def pipeline_of(makers: list[Callable[[], Any]], **settings: Any) -> pulse.Pipeline:
    """A chain of width 4 on this process."""
    chain = pulse.chain(makers, SMALL)
    costs = pulse.weighted_costs(chain, [1.0] * len(makers))
    plan = pulse.make_plan(chain, costs, pulse.interleaved(1, len(makers)))
    return pulse.Pipeline(plan, lambda y, batch: y.sum(), 2, **settings)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Ending(nn.Linear):
    """Gives its result another end."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.end = end

    def forward(self, given: Tensor) -> Any:
        return self.end(super().forward(given))


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (Tensor.half, r"layers.1 returns float16\[2, 4\], its layer declares float32\[2, 4\]"),
        (Tensor.detach, "layers.1 has no output with a gradient"),
    ],
    ids=["half", "detached"],
)
def test_another_dtype_and_no_gradient_are_refused(end: Any, fault: str) -> None:
    pipeline = pipeline_of([linear, lambda: Ending(end), linear])
    with pytest.raises(BackboneError, match=fault):
        pipeline.step([{"noisy": torch.ones(2, 4)}])


def test_what_a_layer_provides_is_checked() -> None:
    chain = joining_chain()
    first = replace(chain.layers[0], provides={"time": pulse.TensorSpec((16,), dtype="float64")})
    chain = replace(chain, layers=(first, *chain.layers[1:]))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, EVEN), pulse.fold(1))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.mean(), 3)
    with pytest.raises(BackboneError, match=r"part.0 returns .*float32\[3, 16\], its .*float64"):
        pipeline.step([{"noisy": torch.ones(3, 8, 5, 7)}])


@pytest.mark.parametrize(
    "part",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.1),
        nn.RReLU(),
        nn.FractionalMaxPool2d(2, output_size=1),
        nn.GRU(4, 4, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
    ],
    ids=lambda part: type(part).__name__,
)
def test_random_modules_are_refused(part: nn.Module) -> None:
    def make() -> nn.Module:
        return nn.Sequential(linear(), part)

    with pytest.raises(BackboneError, match=rf"layers.1: {type(part).__name__} \(1\) draws"):
        pipeline_of([linear, make, linear])


def test_modules_that_draw_nothing_are_taken() -> None:
    def make() -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.0), nn.RReLU().eval(), nn.Dropout(0.5).eval())

    assert pipeline_of([make, linear]).step([{"noisy": torch.ones(2, 4)}])


def test_shared_parameters_are_refused() -> None:
    kept = linear()
    with pytest.raises(BackboneError) as caught:
        pipeline_of([lambda: kept, linear, lambda: nn.Sequential(kept)])
    assert "layers.2: its parameter 0.weight is also layers.0's weight" in str(caught.value)


class Counting(nn.Module):
    """Has a constant buffer, and counts calls in another."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return given * (self.scale + self.calls)


def test_shared_buffers_may_not_be_written() -> None:
    """Constant ones may be shared, and a layer's own may be written."""
    for counts in (True, False):
        kept = Counting(counts)
        both = [lambda kept=kept: nn.Sequential(linear(), kept)] * 2
        pipeline = pipeline_of([linear, *both, lambda: Counting(True)])
        if not counts:
            pipeline.step([{"noisy": torch.ones(2, 4)}])
            continue
        with pytest.raises(BackboneError) as caught:
            pipeline.step([{"noisy": torch.ones(2, 4)}])
        (fault,) = caught.value.faults
        assert fault.startswith("layers.1 modifies its buffer 1.calls, which layers.2 shares")
        assert "1 more like it" in fault


class Rotating(nn.Linear):
    """Rotates pairs by a complex buffer, of which a cast to the run's dtype keeps all."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([1.0, 2.0])))

    def forward(self, given: Tensor) -> Tensor:
        pairs = super().forward(given).float().unflatten(-1, (2, 2))
        turned = torch.view_as_complex(pairs) * self.turns
        return torch.view_as_real(turned).flatten(-2).to(given.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_complex_buffers_keep_their_values(dtype: torch.dtype) -> None:
    pipeline = pipeline_of([linear, Rotating], dtype=dtype)
    given, state = torch.ones(2, 4, dtype=dtype), pipeline.full_state_dict()
    assert state["layers.1.turns"].dtype == torch.complex64
    assert state["layers.1.weight"].dtype == dtype
    plain = [linear().to(dtype), Rotating()]
    plain[1]._apply(lambda tensor: tensor if tensor.is_complex() else tensor.to(dtype))
    for i, module in enumerate(plain):
        before = f"layers.{i}."
        own = {k.removeprefix(before): v for k, v in state.items() if k.startswith(before)}
        module.load_state_dict(own)
    (loss,) = pipeline.step([{"noisy": given}])
    assert torch.equal(loss, plain[1](plain[0](given)).sum())


class Spectrum(nn.Module):
    """Trains a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, given: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(given) * self.weight, n=4)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(BackboneError, match=r"layers.1: its parameter weight is complex64, but"):
        pipeline_of([linear, Spectrum])
    with pytest.raises(DerivationError, match=r"its parameter 1.weight is complex64, but"):
        pulse.from_module(
            nn.Sequential(linear(), Spectrum()), {"input": torch.ones(2, 4)}, sample="input"
        )


def test_a_maker_may_keep_its_module() -> None:
    kept = linear()
    for _ in range(2):
        assert pipeline_of([lambda: kept, linear]).step([{"noisy": torch.ones(2, 4)}])


def test_costs_and_cuts_of_another_chain_are_refused() -> None:
    chain, other = (pulse.chain([linear] * n, SMALL) for n in (8, 6))
    costs = pulse.weighted_costs(other, [1.0] * 6)
    with pytest.raises(PlanError, match="do not match chain: they have 6 layers, it has 8"):
        pulse.make_plan(chain, costs, pulse.fold(2))
    named = replace(costs, names=("x", *costs.names[1:]))
    with pytest.raises(PlanError, match="layer 0 called 'x', its layer 0 is 'layers.0'"):
        pulse.make_plan(other, named, pulse.fold(2))
    for cuts in ((0, 4), (1, 6), (0, 3, 3, 6), (0, 2, 6)):
        with pytest.raises(PlanError, match=re.escape(f"cuts {cuts}")):
            pulse.Plan(other, pulse.Partition(pulse.sequential(1), cuts))
