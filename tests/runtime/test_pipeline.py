"""Layers of one's own in ``Pipeline``: what is refused, and what a loop asks of all processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.planner.layout.embedder_choice import EmbedderChoice
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.random_draws import reserves_numbers
from tests.ranks import run_ranks

WIDTH, SAMPLES = 8, 4
NOISE = torch.Generator()
NUMPY_NOISE = np.random.default_rng(0)


class Block(nn.Module):
    """A linear map and what ``after`` makes of it."""

    def __init__(self, after: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.noise, self.calls, self.after = torch.Generator(), 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.after(self, torch.tanh(self.linear(x)))


def pipeline_of(
    makers: list[Callable[[], nn.Module]],
    num_stages: int = 1,
    loss: Any = lambda y, batch: y.square().mean(),
    recompute: tuple[int, ...] = (),
) -> pulse.Pipeline:
    """A chain on this process."""
    chain = pulse.chain(makers, pulse.TensorSpec((WIDTH,)))
    costs = pulse.weighted_costs(chain, [1.0] * len(makers))
    placement = pulse.interleaved(1, num_stages) if num_stages > 1 else pulse.sequential(1)
    plan = pulse.make_plan(chain, costs, placement, activations=pulse.ActivationPolicies(recompute))
    return pulse.Pipeline(plan, loss, SAMPLES)


def batches(step: int = 0, count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"noisy": torch.randn(SAMPLES, WIDTH, generator=generator)} for _ in range(count)]


def attention(block: Any, h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.2)[0]


DRAWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "dropout": (lambda block, h: F.dropout(h, 0.2, block.training), "of torch's generator"),
    "droppath": (lambda block, h: h * torch.rand(SAMPLES, 1).round(), "of torch's generator"),
    "attention": (attention, "of torch's generator"),
    "python": (lambda block, h: h * random.random(), "of Python's generator"),
    "numpy": (lambda block, h: h * float(np.random.rand()), "of numpy's generator"),
    "own": (lambda block, h: h + torch.randn(WIDTH, generator=block.noise), "its generator noise"),
    "shared": (lambda block, h: h + torch.randn(WIDTH, generator=NOISE), "test_pipeline.NOISE"),
    "shared numpy": (lambda block, h: h * float(NUMPY_NOISE.random()), "test_pipeline.NUMPY_NOISE"),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_functions_that_draw_are_refused(kind: str) -> None:
    after, whose = DRAWS[kind]
    for recompute in ((), (1,)):
        pipeline = pipeline_of(
            [lambda: nn.Linear(WIDTH, WIDTH), *[lambda: Block(after)] * 3], 2, recompute=recompute
        )
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(BackboneError) as caught:
                call(batches())
            (fault,) = caught.value.faults
            assert fault.startswith("layers.1 draws random numbers") and whose in fault
            assert "Set its dropout to 0" in fault and "(and of 2 more like it)" in fault


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


def test_what_draws_later_or_elsewhere_is_refused() -> None:
    def late(block: Any, h: Tensor) -> Tensor:
        return F.dropout(h) if block.calls > 5 else h

    pipeline = pipeline_of([lambda: Block(late)])
    pipeline.step(batches())
    with pytest.raises(BackboneError, match="layers.0 draws random numbers"):
        pipeline.step(batches())
    noisy = pipeline_of([lambda: Block(lambda block, h: _Noisy.apply(h))] * 2)
    noisy.evaluate(batches())
    with pytest.raises(BackboneError, match=r"the backward of layers.0 to layers.1 draws random"):
        noisy.step(batches())
    for loss in (lambda y, b: (y * torch.rand(1)).sum(), lambda y, b: y.sum() * random.random()):
        with pytest.raises(BackboneError, match="the loss draws random numbers"):
            pipeline_of([lambda: Block(lambda block, h: h)], loss=loss).step(batches())


def test_reserved_random_numbers_are_no_draw() -> None:
    """Transformer Engine's fused attention moves the GPU's generator and uses none of it."""
    engine = type("Fused", (nn.Module,), {"__module__": "transformer_engine.pytorch.attention"})
    derived = type("Attention", (engine,), {})
    assert reserves_numbers(nn.Sequential(nn.Linear(2, 2), derived()))
    assert not reserves_numbers(nn.Sequential(nn.Linear(2, 2)))


def test_weights_are_drawn_by_seed_and_name_whatever_draws_them() -> None:
    """Also of generators that are not torch's, which go on as if no layer had been built."""

    class Drawn(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            nn.init.constant_(self.bias, random.random() + float(np.random.rand()))

    found = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        expected = random.Random(seed).random(), np.random.RandomState(seed).rand()
        found.append(pipeline_of([Drawn] * 2).state_dict())
        assert (random.random(), np.random.rand()) == expected
    assert found[0]["layers.0.bias"][0] != found[0]["layers.1.bias"][0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_a_layer_keeps_begins_with_the_first_step() -> None:
    """The try before it leaves attributes as they were, wherever the chain is cut."""

    def counted(block: Any, h: Tensor) -> Tensor:
        last = getattr(block, "last", None)
        block.last = h.detach()
        return h / block.calls if last is None else h / block.calls + 0.1 * last

    def first_input(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (2 * given[0],)

    def make() -> nn.Module:
        block = Block(counted)
        block.register_forward_pre_hook(first_input)  # of the module's own call
        return block

    pipelines = [pipeline_of([make] * 4, stages) for stages in (1, 2, 4)]
    whole, *cut = [[p.step(batches(step)) for step in range(2)] for p in pipelines]
    assert whole == cut[0] == cut[1]
    layers = dict(layer for s in pipelines[0].stages.values() for layer in s.named_layers())
    assert [layer.calls for layer in layers.values()] == [6] * 4


def test_a_layer_that_freezes_itself_is_refused() -> None:
    def toggling(block: Any, h: Tensor) -> Tensor:
        block.linear.weight.requires_grad_(block.calls % 2 == 0)
        return h

    with pytest.raises(BackboneError, match="layers.0 sets requires_grad of .* linear.weight"):
        pipeline_of([lambda: Block(toggling)]).step(batches())


class Averaging(nn.Module):
    """Has buffers that every forward writes into, replaces or makes."""

    mean: Tensor
    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", None)
        self.register_buffer("table", torch.ones(1, WIDTH).expand(SAMPLES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen = x.detach()
        found: Tensor = self.norm(x) + self.mean + self.table
        return found


def test_an_evaluation_leaves_buffers_as_they_were() -> None:
    makers: list[Callable[[], nn.Module]] = [lambda: nn.Linear(WIDTH, WIDTH), Averaging]
    once, twice = (pipeline_of(makers, 2, recompute=(0,)) for _ in range(2))
    for step in range(2):
        before = {name: value.clone() for name, value in twice.state_dict().items()}
        losses = twice.evaluate(batches(9))
        after = twice.state_dict()
        assert before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        assert losses == twice.evaluate(batches(9))
        assert once.step(batches(step)) == twice.step(batches(step))
    twice.train(False)
    assert twice.evaluate(batches(9)) != losses


def test_inference_mode_around_a_pipeline_changes_nothing() -> None:
    """Tensors that it keeps are of no such mode; microbatches and layers' results may be."""

    class Skipped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, skip: Tensor | int = 0) -> Tensor:
            self.calls.add_(1)
            with torch.inference_mode():
                shift = (x + skip).mean()
            return super().forward(x) + skip + shift.clone()

    def make() -> pulse.Pipeline:
        makers = [nn.Identity, *[Skipped] * 3]
        chain = pulse.chain(makers, pulse.TensorSpec((4,)), skips=[(0, 2), (1, 3)])
        plan = pulse.make_plan(
            chain,
            pulse.weighted_costs(chain, [1.0] * 4),
            pulse.sequential(1),
            activations=pulse.ActivationPolicies(selective=frozenset({1}), offload=frozenset({2})),
        )
        return pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2)

    ones = torch.ones(2, 4)

    def results(pipeline: pulse.Pipeline) -> list[Tensor]:
        losses = pipeline.evaluate([{"noisy": ones.clone()}])
        losses += pipeline.step([{"noisy": ones}])
        return [*losses, pipeline.grad_norm()]

    expected = results(make())
    with torch.inference_mode():
        found = results(make())
    assert not any(tensor.is_inference() for tensor in found[:2])
    assert all(map(torch.equal, found, expected))


class Embedding(nn.Module):
    """Embeds a batch's times by frequencies drawn at random, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> tuple[Tensor, ...]:
        angles = conditioning["times"][:, None].to(self.frequencies.dtype) * self.frequencies
        made = self.linear(torch.sin(angles))
        return *inputs, made


class Embedded(nn.Module):
    """Adds the embedding; its bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.bias.requires_grad_(False)

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> tuple[Tensor, ...]:
        (x,) = inputs
        skip = sum(skips.values(), torch.zeros(()))
        return (x + torch.tanh(self.linear(x + conditioning["embedded"] + skip)),)


def embedded_plan(num_processes: int, replicated: bool) -> pulse.Plan:
    """An embedder and eight layers on a fold."""
    spec = pulse.TensorSpec((WIDTH,))
    layers = [
        pulse.Layer(
            "embed",
            lambda context: Embedding(),
            (spec,),
            (spec,),
            provides={"embedded": spec},
            uses=("times",),
            embedder=True,
        )
    ]
    layers += [
        pulse.Layer(
            f"blocks.{i}",
            lambda context: Embedded(),
            (spec,),
            (spec,),
            uses=("embedded",),
            pushes={"skip": 0} if i == 1 else {},
            pops={"skip": spec} if i == 6 else {},
        )
        for i in range(8)
    ]
    fields = {"times": pulse.TensorSpec((), dtype="float32")}
    chain = pulse.Backbone("embedded", tuple(layers), fields)
    costs = pulse.weighted_costs(chain, [1.0] * 9)
    plan = pulse.make_plan(chain, costs, pulse.fold(num_processes))
    return replace(plan, embedders=(EmbedderChoice("embed", 0, 0, replicated),))


def test_a_loss_without_a_gradient_is_refused() -> None:
    def no_grad(y: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            return y.square().mean()

    losses: list[Any] = [
        lambda y, batch: y.detach().square().mean(),
        lambda y, batch: torch.tensor(y.square().mean().item()),
        no_grad,
    ]
    for loss in losses:
        pipeline = pipeline_of([lambda: nn.Linear(WIDTH, WIDTH)] * 2, 2, loss)
        with pytest.raises(
            ValueError, match="the loss has no gradient: .* Compute it from the pred"
        ):
            pipeline.step(batches())
        assert len(pipeline.evaluate(batches())) == 3


class Tied(nn.Module):
    """Two maps of one weight, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def test_a_derived_chain_takes_the_state_dict_of_its_module() -> None:
    """With all names of tied weights, which are one weight, and buffers, which are constants."""
    chain = pulse.from_module(Tied(), {"x": torch.zeros(2, WIDTH)}, sample="x")
    costs = pulse.weighted_costs(chain, [1.0] * len(chain.layers))
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SAMPLES)
    module = Tied()
    state = module.state_dict()
    first, other = "blocks.0.weight", "blocks.2.weight"
    for gone in (None, first, other, "table"):
        pipeline.load_state_dict({key: t for key, t in state.items() if key != gone})
        for name, value in pipeline.state_dict().items():
            assert torch.equal(value, state[name])
            pipeline.state_dict()[name].zero_()
    for wrong, told in (
        ({other: state[other] + 1}, f"{first} and {other} are one weight here"),
        (
            {"table": state["table"] + 1},
            "the buffer table differs from the value that the module computes",
        ),
        ({"table": state["table"][:2]}, r"table is \(2,\), not \(8,\)"),
        ({"none": state["table"]}, "none belongs to no layer"),
    ):
        with pytest.raises(PulseError, match=told):
            pipeline.load_state_dict({**state, **wrong})
        assert not any(value.any() for value in pipeline.state_dict().values())


def train(replicated: bool = False) -> dict[str, Any]:
    """Three clipped steps of this process, and what it says of all."""
    plan = embedded_plan(dist.get_world_size() if dist.is_initialized() else 1, replicated)
    pipeline = pulse.Pipeline(
        plan, lambda y, b: (y - b["noisy"]).square().mean(), SAMPLES, timeout_s=60
    )
    found: dict[str, Any] = {"none": pipeline.grad_norm(), "losses": [], "norms": []}
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0)
    first = pipeline.full_state_dict()
    for step in range(3):
        times = torch.arange(SAMPLES, dtype=torch.float32)
        data = [{**batch, "times": times + m} for m, batch in enumerate(batches(step))]
        optimizer.zero_grad()
        found["losses"] += pipeline.step(data, everywhere=True)
        norms = [pipeline.grad_norm(kind) for kind in (2, 3.0, math.inf)]
        assert torch.equal(pipeline.clip_grad_norm_(0.05), norms[0])
        found["norms"] += [*norms, pipeline.grad_norm()]
        optimizer.step()
    found["whole"] = pipeline.full_state_dict()
    found["alone"] = pipeline.full_state_dict(to=0)
    found["gradients"] = {name: p.grad for name, p in pipeline.named_parameters()}
    pipeline.load_state_dict(first)
    found["again"] = pipeline.evaluate(data, everywhere=True)
    found["said"] = _not_finite(pipeline)
    return found


def _not_finite(pipeline: pulse.Pipeline) -> str:
    for name, parameter in pipeline.named_parameters():
        if name == "blocks.5.linear.weight":
            assert parameter.grad is not None
            parameter.grad[0, 0] = math.nan
    with pytest.raises(PulseError) as caught:
        pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert pipeline.grad_norm().isnan()
    return str(caught.value)


def train_all() -> list[dict[str, Any]]:
    """Sent and replicated; then one that draws."""
    dist.init_process_group("gloo")
    found = [train(), train(replicated=True)]
    chain = pulse.chain([lambda: Block(DRAWS["dropout"][0])] * 4, pulse.TensorSpec((WIDTH,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 4), pulse.fold(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.sum(), SAMPLES)
    with pytest.raises(BackboneError, match=r"layers.0 draws .*\(and of 3 more like it\)"):
        pipeline.step(batches())
    return found


def test_processes_clip_save_and_say_the_same_as_one() -> None:
    alone = train()
    first, second = run_ranks(2, train_all)
    assert alone["none"] == 0 and "gradients of blocks.5 are not finite" in alone["said"]
    for process in (first[0], second[0]):
        for name in ("none", "losses", "norms", "again", "said"):
            assert process[name] == alone[name], name
        assert process["whole"].keys() == alone["whole"].keys()
        for name, value in alone["whole"].items():
            assert torch.equal(process["whole"][name], value), name
    assert first[0]["alone"].keys() == alone["whole"].keys() and second[0]["alone"] == {}
    for process in (first[1], second[1]):
        for name in ("losses", "norms", "again"):
            torch.testing.assert_close(process[name], alone[name], rtol=1e-5, atol=1e-6)


def test_a_norm_is_torchs() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plan = embedded_plan(1, False)
        pipeline = pulse.Pipeline(plan, lambda y, b: y.square().mean(), SAMPLES, dtype=dtype)
        data = [{**b, "noisy": b["noisy"].to(dtype)} for b in batches()]
        pipeline.step([{**b, "times": torch.ones(SAMPLES)} for b in data])
        parameters = list(pipeline.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        for kind in (2, 1.5, math.inf):
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            got = pipeline.clip_grad_norm_(1e-2, kind)
            mine = [p.grad for p in parameters]
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            expected = torch.nn.utils.clip_grad_norm_(parameters, 1e-2, kind)
            close = 2e-2 if dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(got.to(dtype), expected, rtol=close, atol=0)
            for p, gradient in zip(parameters, mine, strict=True):
                torch.testing.assert_close(p.grad, gradient, rtol=close, atol=0)
    for kind in (0, -math.inf, math.nan, "2", True):
        with pytest.raises(PulseError, match="norm_type must be a positive number"):
            pipeline.grad_norm(kind)  # type: ignore[arg-type]
    for most in (-1, math.nan, "1", None):
        with pytest.raises(PulseError, match="max_norm must be a number from 0 on"):
            pipeline.clip_grad_norm_(most)  # type: ignore[arg-type]
