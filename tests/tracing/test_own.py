"""Modules unlike diffusers': right, or refused with the reason and the line."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import megatron_pulse as pulse
from megatron_pulse.profile.flops import model_flops
from megatron_pulse.profile.parameters import count_parameters
from megatron_pulse.tracing.from_module import source_of
from megatron_pulse.tracing.graph_analysis import operation
from megatron_pulse.tracing.initial_weights.meta_init import (
    build_without_memory,
    release_parameter_memory,
)
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing.bits import chain_equal_to, skips_of
from tests.tracing.own import WIDTH, Block, Dense, Hidden, InPlace, Regions, TwoOutputs


def line_of(module: type, code: str) -> str:
    """Text by which a fault names the line of ``module`` with ``code``."""
    lines, first = inspect.getsourcelines(module)
    number = next(i for i, line in enumerate(lines) if code in line)
    return f"{inspect.getsourcefile(module)}:{first + number}"


def test_dense_skips() -> None:
    given = {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
    chain = chain_equal_to(Dense(), given, "image")
    provided = [name for unit in chain.units for name in unit.provides]
    assert skips_of(chain) and provided


def test_what_writes_in_place_stays_with_what_it_writes() -> None:
    chain = chain_equal_to(InPlace(), {"x": torch.randn(3, WIDTH)}, "x")
    assert [unit.name for unit in chain.units] == [f"blocks.{i}" for i in range(4)]


def test_regions_of_autocast_and_no_grad_stay_whole() -> None:
    chain = chain_equal_to(Regions(), {"x": torch.randn(2, WIDTH), "kept": torch.ones(2, 3)}, "x")
    assert sum(not unit.embedder for unit in chain.units) == 3


def test_two_outputs_need_a_word() -> None:
    given = {"x": torch.randn(3, WIDTH)}
    with pytest.raises(DerivationError, match=r"2 tensors \(0: \[3, 2\], 1: \[3, 3\]\).*output=0"):
        pulse.from_module(TwoOutputs(), given, sample="x")
    chain = chain_equal_to(TwoOutputs(), given, "x", output=1)
    assert "heads.1.weight" in chain.units[-1].weights
    with pytest.raises(DerivationError, match="output=2"):
        pulse.from_module(TwoOutputs(), given, sample="x", output=2)


class Noisy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Deciding(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Overwriting(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class Tied(nn.Module):
    """The first and the last of its blocks are one."""

    def __init__(self) -> None:
        super().__init__()
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), Block()])
        self.again = first

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.again):
            x = block(x)
        return x


REFUSED = [
    (Noisy(nn.Linear(WIDTH, 3)), "randn_like", line_of(Noisy, "randn_like")),
    (Deciding(nn.Linear(WIDTH, 3)), "torch.export cannot follow it", line_of(Deciding, "sum")),
    (Overwriting(nn.Linear(WIDTH, 3)), "writes to x", line_of(Overwriting, "mul_")),
    (InPlace(counts=True), "writes to calls", line_of(InPlace, "add_(1)\n")),
    (nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.1)), "dropout.default is random", "(1)"),
    (nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)), "running statistics", "(1)"),
    (Hidden(), "mul_.Tensor writes to an input of wrap_with", line_of(Hidden, "mul_(2)")),
    (nn.Sequential(nn.ReLU()), "does not depend on", ""),
]


def test_lazy_modules_are_named() -> None:
    """Also those that a factory makes without memory; once called they are as others."""

    def make() -> nn.Module:
        lazy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())
        return lazy.eval()

    x = torch.randn(3, WIDTH)
    for derive in (
        lambda: pulse.from_module(make(), {"input": x}, sample="input"),
        lambda: release_parameter_memory(build_without_memory(make), torch.float32),
    ):
        with pytest.raises(DerivationError) as caught:
            derive()
        first, second = caught.value.faults
        assert first.startswith(
            "1 is a LazyLinear whose shapes are not set yet (weight, bias). Give its si"
        )
        assert second.startswith("2 is a LazyBatchNorm1d") and "running_mean" in second
    module = make()
    module(x)
    assert pulse.from_module(module, {"input": x}, sample="input").layers


@pytest.mark.parametrize("module, reason, place", REFUSED, ids=[r for _, r, _ in REFUSED])
def test_what_cannot_be_run_is_refused_with_its_line(
    module: nn.Module, reason: str, place: str
) -> None:
    (name,) = inspect.signature(module.forward).parameters
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(module, {name: torch.randn(3, WIDTH)}, sample=name)
    assert reason in str(caught.value) and place in str(caught.value)
    assert type(module).__name__ in str(caught.value)


class Rescaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return (self.linear(x) / self.factor) / (count / 1)


def test_division_by_one_is_no_operation() -> None:
    """It is an operation if it changes the dtype."""
    given = {"x": torch.randn(2, WIDTH), "count": torch.tensor([[3], [5]])}
    for factor, divisions in ((1.0, 2), (2.0, 3)):
        (unit,) = chain_equal_to(Rescaled(factor), given, "x").units
        assert sum(operation(node) == "div.Tensor" for node in unit.graph.nodes) == divisions


def test_lines_are_looked_up_where_there_is_a_fault() -> None:
    source = source_of(pulse.from_module(nn.Linear(WIDTH, 3), {"input": torch.randn(2, WIDTH)},
                                         sample="input"))  # fmt: skip
    assert source is not None
    (unit,) = source.chains.first.units
    assert not any("stack_trace" in node.meta for node in unit.graph.nodes)


def test_uses_of_one_weight_are_not_parted() -> None:
    chain = chain_equal_to(Tied(), {"x": torch.randn(2, WIDTH, 4, 4)}, "x")
    assert len(chain.units) == 1


def test_inputs_of_unknown_names_are_shown() -> None:
    given = {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(Dense(), given)
    assert "sample=" in str(caught.value) and "when" in str(caught.value)
    assert "float32[2, 3, 4, 4]" in str(caught.value)
    with pytest.raises(DerivationError, match="'x' is not one of its inputs"):
        pulse.from_module(Dense(), given, sample="x")
    with pytest.raises(DerivationError, match="'layers', not 'blocks' or 'pieces'"):
        pulse.from_module(Dense(), given, sample="image", granularity="layers")
    with pytest.raises(DerivationError, match="one time per sample"):
        one = {**given, "when": torch.tensor(3.0)}
        pulse.from_module(Dense(), one, sample="image", timestep="when")


def test_a_module_without_values_is_for_planning() -> None:
    with torch.device("meta"):
        module, given = Dense(), {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
    backbone = pulse.from_module(module, given, sample="image")
    assert sum(count_parameters(backbone)) == sum(p.numel() for p in module.parameters())
    with pytest.raises(ValueError, match="is for planning"):
        backbone.layers[0].build(None)


def test_a_derived_chain_is_a_backbone() -> None:
    module = Dense()
    given = {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
    backbone = pulse.from_module(module, given, sample="image", timestep="when")
    assert backbone.batch_fields == {"timesteps": pulse.TensorSpec(())}
    assert backbone.input_spec == pulse.TensorSpec((3, 4, 4)) == backbone.output_spec
    assert not pulse.check_backbone(backbone)
    half = pulse.from_module(
        copy.deepcopy(module).bfloat16(),
        {"image": given["image"].bfloat16(), "when": given["when"].bfloat16()},
        sample="image",
        timestep="when",
    )
    assert model_flops(half) == model_flops(backbone)
    costs = pulse.weighted_costs(backbone, [1.0] * len(backbone.layers))
    plan = pulse.make_plan(backbone, costs, pulse.sequential(1))
    for size in (2, 1, 4):  # any size: it is exported when it comes
        pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), size)
        assert dict(pipeline.named_parameters()).keys() == dict(module.named_parameters()).keys()
        noisy, times = torch.randn(size, 3, 4, 4), torch.rand(size)
        with FlopCounterMode(display=False):  # whose hooks are no part of the module
            (loss,) = pipeline.step([{"noisy": noisy, "timesteps": times}])
        assert torch.equal(loss, module(noisy, times).square().mean())
    pipeline.load_state_dict({n: p.detach() + 1 for n, p in module.named_parameters()})
    assert torch.equal(pipeline.state_dict()["enter.bias"], module.enter.bias + 1)
    with pytest.raises(RuntimeError, match="leave.more belongs to no layer"):
        pipeline.load_state_dict({**pipeline.state_dict(), "leave.more": torch.ones(1)})
    with pytest.raises(ValueError, match="exported in torch.float32"):
        pulse.Pipeline(plan, lambda y, batch: y.sum(), 2, dtype=torch.float64).evaluate(
            [{"noisy": torch.ones(2, 3, 4, 4).double(), "timesteps": torch.ones(2)}]
        )


class Weighed(nn.Module):
    """Blocks that share what is small at two samples, and not at three."""

    WIDE = 6400

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        shared = wide * 2
        for block in self.blocks:
            x = block(x) + shared.mean(1, keepdim=True)
        return x


def test_units_are_the_same_at_every_size() -> None:
    module = Weighed()
    given = {"x": torch.randn(2, WIDTH), "wide": torch.randn(2, Weighed.WIDE)}
    assert 2 * 4 * Weighed.WIDE < 1 << 16 < 3 * 4 * Weighed.WIDE
    backbone = pulse.from_module(module, given, sample="x")
    assert not any(layer.embedder for layer in backbone.layers)
    larger = {name: torch.cat([value] * 2) for name, value in given.items()}
    from_larger = pulse.from_module(module, larger, sample="x")
    assert [layer.name for layer in from_larger.layers if layer.embedder] == ["embed.root"]


class Moded(nn.Module):
    """Scales otherwise in training; ``skips``: has an operation more."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.skips, self.nothing = skips, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.nothing(block(x)) * (3 if self.training else 2)
            if self.skips and self.training:
                x = x * 5
        return x


def pipeline_of(module: nn.Module, size: int) -> pulse.Pipeline:
    chain = pulse.from_module(module, {"x": torch.randn(2, WIDTH)}, sample="x")
    costs = pulse.weighted_costs(chain, [1.0] * len(chain.layers))
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    return pulse.Pipeline(plan, lambda y, _: y.square().mean(), size)


@pytest.mark.parametrize("size", [2, 4])
def test_pipelines_in_evaluation_mode_evaluate_modules_in_theirs(size: int) -> None:
    """Also at sizes that are exported when the module's own mode is another."""
    module, x = Moded(), torch.randn(size, WIDTH)

    def expected(training: bool) -> Tensor:
        return module.train(training)(x).square().mean().detach()

    pipeline = pipeline_of(module, size)
    for training in (True, False, True):
        pipeline.train(training)
        module.train(not training)
        assert torch.equal(pipeline.evaluate([{"noisy": x}])[0], expected(training))
        module.train(not training)
    module.eval()
    pipeline = pipeline_of(module, size)
    module.train()
    assert torch.equal(pipeline.evaluate([{"noisy": x}])[0], expected(False))
    assert module.training is False


def test_evaluation_modes_that_take_another_path_are_refused() -> None:
    pipeline = pipeline_of(Moded(skips=True), 2)
    pipeline.train(False)
    with pytest.raises(DerivationError, match="depends on self.training"):
        pipeline.evaluate([{"noisy": torch.randn(2, WIDTH)}])


def test_modes_that_change_nothing_are_exported_once() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, 3))
    source = source_of(pulse.from_module(module, {"input": torch.ones(2, WIDTH)}, sample="input"))
    assert source is not None
    assert source.chains.find(0, 2, training=False) is source.chains.first
