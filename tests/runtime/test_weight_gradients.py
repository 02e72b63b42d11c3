"""Operations whose weight gradients wait: bit for bit those of torch's own backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.parameters.split_backward import deferring
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTH = 512
"""At this width fp32 products are summed in another order than small ones."""

Call = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Way:
    """A use of parameters: what is computed, of which shapes, and whose gradients wait."""

    call: Call
    parameters: dict[str, tuple[int, ...]]
    waiting: frozenset[str]
    given: tuple[int, ...] = (2, 7, WIDTH)
    view: Callable[[Tensor], Tensor] = lambda given: given
    frozen: frozenset[str] = frozenset()


def way(
    call: Call, parameters: dict[str, tuple[int, ...]], waiting: str = "w b", **more: object
) -> Way:
    return Way(call, parameters, frozenset(waiting.split()), **more)  # type: ignore[arg-type]


def linear(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.linear(given, p["w"], p.get("b"))


def by_name(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.linear(weight=p["w"], bias=p["b"], input=given)


def megatron(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    import megatron.core.tensor_parallel.layers as layers

    return layers.linear_with_grad_accumulation_and_async_allreduce(
        given, p["w"], p.get("b"), False, allreduce_dgrad=False, sequence_parallel=False
    )


def computed_bias(operation: Call) -> Call:
    return lambda given, p: operation(given, {"w": p["w"], "b": (p["b"] * p["b"]).sin()})


def twice(operation: Call) -> Call:
    """As Flux does: both streams through one layer."""

    def both(given: Tensor, p: dict[str, Tensor]) -> Tensor:
        first, second = given[:, :3], given[:, 3:].sin()
        return torch.cat([operation(second, p).tanh(), operation(first, p)], dim=1)

    return both


def thrice(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    for _ in range(3):
        given = linear(given.tanh(), p)
    return given


def changed_after_uses(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    """If torch's result is a view, a sum of three gradients is associated differently."""
    result = linear(given, p)
    double, more = result * 2, result + given
    result.sigmoid_()
    return double.tanh() + more.sin() + result


def first_with_data(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    return linear(given.detach(), p) * linear(given, p)


def then_with_data(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    return linear(given, p) * linear(given.detach(), p)


def autocast(given: Tensor, p: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return linear(given, p) + linear(given.tanh(), p)


def checkpointed(reentrant: bool) -> Call:
    def call(given: Tensor, p: dict[str, Tensor]) -> Tensor:
        inner: Tensor = checkpoint(
            lambda given: linear(given, p).tanh(), given, use_reentrant=reentrant
        )
        return inner.square()

    return call


def convolution(function: Callable[..., Tensor], *rest: object, **named: object) -> Call:
    return lambda given, p: function(given, p["w"], p.get("b"), *rest, **named)


SQUARE: dict[str, tuple[int, ...]] = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
WIDE: dict[str, tuple[int, ...]] = {"w": (96, WIDTH), "b": (96,)}
CONV2D: dict[str, tuple[int, ...]] = {"w": (8, 4, 3, 3), "b": (8,)}
IMAGE = (2, 4, 9, 9)

WAYS: dict[str, Way] = {
    "linear": way(linear, SQUARE),
    "by name": way(by_name, SQUARE),
    "no bias": way(linear, {"w": (96, WIDTH)}, "w"),
    "one vector": way(linear, WIDE, given=(WIDTH,)),
    "one token": way(linear, WIDE, given=(1, 1, WIDTH)),
    "matrix": way(linear, WIDE, given=(33, WIDTH)),
    "four dimensions": way(linear, WIDE, given=(2, 3, 5, WIDTH)),
    "four dimensions, no bias": way(linear, {"w": (96, WIDTH)}, "w", given=(2, 3, 5, WIDTH)),
    "no bias, matrix": way(linear, {"w": (96, WIDTH)}, "w", given=(33, WIDTH)),
    "one number": way(linear, {"w": (96, 1), "b": (96,)}, given=(2, 7, 1)),
    "to one number": way(linear, {"w": (1, WIDTH), "b": (1,)}),
    "a part of the result": way(lambda x, p: linear(x, p).transpose(0, 1)[:, :1].sin(), WIDE),
    "odd sizes": way(linear, {"w": (97, 129), "b": (97,)}, given=(3, 5, 129)),
    "no tokens": way(linear, WIDE, given=(0, WIDTH)),
    "transposed": way(linear, WIDE, given=(7, 2, WIDTH), view=lambda t: t.transpose(0, 1)),
    "column-major": way(linear, WIDE, given=(WIDTH, 33), view=lambda t: t.t()),
    "a part": way(linear, WIDE, given=(2, 7, WIDTH + 5), view=lambda t: t[..., 5:]),
    "expanded": way(linear, WIDE, given=(1, 7, WIDTH), view=lambda t: t.expand(4, -1, -1)),
    "computed bias": way(computed_bias(linear), WIDE, "w"),
    "frozen bias": way(linear, WIDE, "w", frozen=frozenset({"b"})),
    "frozen weight": way(linear, WIDE, "", frozen=frozenset({"w"})),
    "bias that is data": way(lambda x, p: F.linear(x, p["w"], x[0, 0, :96].detach()), WIDE, "w"),
    "a view of a weight": way(lambda x, p: F.linear(x, p["w"].t(), p["b"]), SQUARE, ""),
    "result changed in place": way(lambda x, p: linear(x, p).relu_(), WIDE),
    "changed in place after uses": way(changed_after_uses, SQUARE),
    "twice": way(twice(linear), WIDE),
    "thrice": way(thrice, SQUARE),
    "first with data": way(first_with_data, WIDE, ""),
    "then with data": way(then_with_data, WIDE),
    "autocast": way(autocast, WIDE, ""),
    "checkpoint": way(checkpointed(False), WIDE, ""),
    "reentrant checkpoint": way(checkpointed(True), WIDE, ""),
    "megatron": way(megatron, SQUARE),
    "megatron, no bias": way(megatron, {"w": (96, WIDTH)}, "w"),
    "megatron, matrix": way(megatron, WIDE, given=(33, WIDTH)),
    "megatron, one token": way(megatron, WIDE, given=(1, 1, WIDTH)),
    "megatron, odd sizes": way(megatron, {"w": (97, 129), "b": (97,)}, given=(3, 5, 129)),
    "megatron, a part of the result": way(
        lambda x, p: megatron(x, p).transpose(0, 1)[:, :1].sin(), WIDE
    ),
    "megatron, transposed": way(
        megatron, WIDE, given=(7, 2, WIDTH), view=lambda t: t.transpose(0, 1)
    ),
    "megatron, expanded": way(
        megatron, WIDE, given=(1, 7, WIDTH), view=lambda t: t.expand(4, -1, -1)
    ),
    "megatron, twice": way(twice(megatron), WIDE),
    "megatron, computed bias": way(computed_bias(megatron), WIDE, "w"),
    "megatron, frozen bias": way(megatron, WIDE, "w", frozen=frozenset({"b"})),
    "conv1d": way(convolution(F.conv1d, 2, 1), {"w": (8, 4, 3), "b": (8,)}, given=(2, 4, 9)),
    "conv2d": way(convolution(F.conv2d, 2, 1), CONV2D, given=IMAGE),
    "conv2d, same": way(convolution(F.conv2d, padding="same"), CONV2D, given=IMAGE),
    "conv2d, channels last": way(
        convolution(F.conv2d),
        CONV2D,
        given=(2, 9, 9, 4),
        view=lambda t: t.permute(0, 3, 1, 2),
    ),
    "conv2d, groups": way(convolution(F.conv2d, groups=2), {"w": (8, 2, 3, 3)}, "w", given=IMAGE),
    "conv2d, computed bias": way(computed_bias(convolution(F.conv2d)), CONV2D, "w", given=IMAGE),
    "conv2d, twice": way(
        lambda x, p: F.conv2d(x.sin(), p["w"], p["b"]) * F.conv2d(x, p["w"], p["b"]),
        CONV2D,
        given=IMAGE,
    ),
    "conv2d, one sample": way(convolution(F.conv2d), CONV2D, given=(4, 9, 9)),
    "conv2d, frozen bias": way(
        convolution(F.conv2d), CONV2D, "w", given=IMAGE, frozen=frozenset({"b"})
    ),
    "conv2d, an expanded gradient": way(
        lambda x, p: F.conv2d(x, p["w"], p["b"]).sum((2, 3)), CONV2D, given=IMAGE
    ),
    "conv3d": way(convolution(F.conv3d), {"w": (8, 4, 3, 3, 3), "b": (8,)}, given=(2, 4, 5, 5, 5)),
    "transposed convolution": way(
        convolution(F.conv_transpose2d, 2), {"w": (4, 8, 3, 3), "b": (8,)}, given=IMAGE
    ),
    "transposed convolution, all settings": way(
        convolution(F.conv_transpose2d, (3, 2), 1, 1, 2, 2),
        {"w": (4, 4, 3, 3), "b": (8,)},
        given=IMAGE,
    ),
}


@contextmanager
def megatron_waits() -> Iterator[None]:
    """Megatron's linear layers as the integration leaves them, within only."""
    import megatron.core.tensor_parallel.layers as layers

    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    before = layers.linear_with_grad_accumulation_and_async_allreduce
    defer_wgrad()
    try:
        yield
    finally:
        layers.linear_with_grad_accumulation_and_async_allreduce = before


def train(way: Way, dtype: torch.dtype, split: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Results and gradients of three microbatches; whose gradients waited."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    parameters = {name: nn.Parameter(0.1 * draw(*shape)) for name, shape in way.parameters.items()}
    for name in way.frozen:
        parameters[name].requires_grad_(False)
    found: dict[str, Tensor] = {}
    waiting: set[str] = set()
    wgrad_stores = [WeightGradStore() if split else None for _ in range(3)]
    for m, wgrad_store in enumerate(wgrad_stores):
        leaf = draw(*way.given).requires_grad_()
        with deferring(wgrad_store):
            result = way.call(way.view(leaf.cos()), dict(parameters))
        before = {name: p.grad for name, p in parameters.items()}
        result.backward(draw(*result.shape).to(result.dtype))
        found |= {f"result {m}": result.detach(), f"input {m}": leaf.grad}
        if wgrad_store is not None:
            waiting |= {name for name, p in parameters.items() if p in wgrad_store.parameters}
            assert all(parameters[name].grad is before[name] for name in waiting), "did not wait"
    for wgrad_store in wgrad_stores:
        if wgrad_store is not None:
            wgrad_store.compute()
            assert not wgrad_store.parameters
    return found | {name: p.grad for name, p in parameters.items()}, waiting


@pytest.mark.parametrize("name", WAYS)
def test_gradients_that_wait_are_the_same_to_the_last_bit(name: str) -> None:
    way = WAYS[name]
    for dtype in DTYPES:
        expected, _ = train(way, dtype, split=False)
        with megatron_waits():
            got, waiting = train(way, dtype, split=True)
        assert waiting == way.waiting, dtype
        for what, tensor in expected.items():
            if tensor is None:
                assert got[what] is None, (dtype, what)
                continue
            assert got[what].dtype == tensor.dtype and got[what].stride() == tensor.stride()
            assert torch.equal(got[what], tensor), (dtype, what)


def test_a_gradient_becomes_the_parameters_own_and_few_are_held_at_a_time() -> None:
    """None is copied, and what is held beside the parameters' does not grow with their number."""
    parameters = [nn.Parameter(torch.zeros(1 << 22)) for _ in range(3)]  # 16 MiB each
    made: list[int] = []

    def gradients(number: int) -> Callable[[], tuple[Tensor]]:
        def gradient() -> tuple[Tensor]:
            assert all(p.grad is not None for p in parameters[:number])
            found = torch.ones(1 << 22)
            made.append(found.data_ptr())
            return (found,)

        return gradient

    wgrad_store = WeightGradStore()
    for number, parameter in enumerate(parameters):
        wgrad_store.add((parameter,), gradients(number))
    with torch.no_grad():
        wgrad_store.compute()
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == made


@pytest.mark.parametrize("name", ["linear", "megatron", "conv2d", "megatron, twice"])
def test_no_operation_is_computed_twice(name: str) -> None:
    """Input gradients and weight gradients together take the operations of one backward."""
    from torch.utils.flop_counter import FlopCounterMode

    way = WAYS[name]
    parameters = {k: nn.Parameter(torch.randn(shape)) for k, shape in way.parameters.items()}
    given = torch.randn(way.given, requires_grad=True)

    def count(wgrad_store: WeightGradStore | None) -> tuple[int, int, int]:
        counters = [FlopCounterMode(display=False) for _ in range(3)]
        with counters[0], deferring(wgrad_store):
            result = way.call(given, dict(parameters)).square().sum()
        with counters[1]:
            result.backward()
        with counters[2]:
            if wgrad_store is not None:
                wgrad_store.compute()
        forward, backward, after = (counter.get_total_flops() for counter in counters)
        return forward, backward, after

    forward, whole, _ = count(None)
    with megatron_waits():
        split_forward, inputs, weights = count(WeightGradStore())
    assert split_forward == forward
    assert inputs + weights == whole and inputs == weights


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.waiting])
def test_what_waits_leads_neither_to_the_stage_s_input_nor_to_its_gradient(name: str) -> None:
    """A message brought the one, and another takes the other: they are let go before."""
    way, wgrad_store = WAYS[name], WeightGradStore()
    parameters = {k: nn.Parameter(torch.randn(shape)) for k, shape in way.parameters.items()}
    leaf = torch.randn(way.given, requires_grad=True)
    with megatron_waits(), deferring(wgrad_store):
        result = way.call(way.view(leaf.tanh()), dict(parameters))
    result.sum().backward()
    assert wgrad_store.parameters and leaf.grad is not None
    held = [weakref.ref(leaf.untyped_storage()), weakref.ref(leaf.grad.untyped_storage())]
    del leaf, result
    assert all(storage() is None for storage in held)
    wgrad_store.compute()


@pytest.mark.parametrize("name", ["linear", "megatron", "conv2d"])
def test_a_checkpoint_around_holds_no_input(name: str) -> None:
    """Deferred work uses the recomputed tensors; nothing is kept before."""
    way, wgrad_store = WAYS[name], WeightGradStore()
    parameters = {k: nn.Parameter(torch.randn(shape)) for k, shape in way.parameters.items()}
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def layer(given: Tensor) -> Tensor:
        inner = given.tanh()
        storages.append(weakref.ref(inner.untyped_storage()))
        with deferring(wgrad_store):
            return way.call(inner, dict(parameters))

    leaf = torch.randn(way.given, requires_grad=True)
    with megatron_waits():
        result = checkpoint(layer, leaf, use_reentrant=False)
    assert len(storages) == 1 and storages[0]() is None
    result.sum().backward()
    assert len(storages) == 2 and storages[1]() is not None
    wgrad_store.compute()
    assert storages[1]() is None
    assert all(p.grad is not None for p in parameters.values())


def test_a_weight_that_is_first_used_under_autocast_does_not_wait_in_other_uses() -> None:
    wgrad_store, weight = WeightGradStore(), nn.Parameter(torch.randn(4, 4))
    given = torch.randn(2, 4, requires_grad=True)
    with deferring(wgrad_store):
        with torch.autocast("cpu", torch.bfloat16):
            first = F.linear(given, weight)
        second = F.linear(given, weight)
    (first.float() + second).sum().backward()
    assert not wgrad_store.parameters


class _Energy(nn.Module):
    """Layer whose result includes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(point).tanh().sum(), point)
        found: Tensor = self.linear(x)
        return found + slope


def test_gradients_that_a_layer_asks_for_while_it_runs_are_not_its_weights() -> None:
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        layer, wgrad_store = _Energy(), WeightGradStore()
        x = torch.randn(3, WIDTH, requires_grad=True)
        with deferring(wgrad_store if split else None):
            y = layer(x)
        y.square().sum().backward()
        assert (layer.linear.weight in wgrad_store.parameters) == split
        wgrad_store.compute()
        found.append([x.grad, layer.linear.weight.grad, layer.linear.bias.grad])
    for whole, parts in zip(*found, strict=True):
        assert whole is not None and parts is not None and torch.equal(whole, parts)


class _Unrolled(torch.autograd.Function):
    """Layer whose backward computes gradients of its own forward, as implicit layers do."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            ctx.given = given.detach().requires_grad_()
            ctx.result = function(ctx.given)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (found,) = torch.autograd.grad(ctx.result, ctx.given, gradient)
        return found, None


@pytest.mark.parametrize("before", [False, True])
def test_gradients_that_a_backward_asks_for_are_not_its_weights(before: bool) -> None:
    """Deferred weights ran before or after."""
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        own, other, wgrad_store = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            WeightGradStore(),
        )
        x = torch.randn(3, WIDTH, requires_grad=True)
        with deferring(wgrad_store if split else None):
            y = _Unrolled.apply(other(x) if before else x, lambda z, own=own: own(z).tanh())
            y = y if before else other(y)
        y.square().sum().backward()
        assert wgrad_store.parameters == (set(other.parameters()) if split else set())
        wgrad_store.compute()
        assert own.weight.grad is None and own.bias.grad is None
        found.append([x.grad, other.weight.grad, other.bias.grad])
    for whole, parts in zip(*found, strict=True):
        assert whole is not None and parts is not None and torch.equal(whole, parts)


@pytest.mark.parametrize("name", ["linear", "megatron", "conv2d", "four dimensions"])
def test_a_weight_that_is_written_into_before_its_backward_is_refused(name: str) -> None:
    """As torch does where the backward is whole."""
    way = WAYS[name]
    for wgrad_store in (None, WeightGradStore()):
        parameters = {k: nn.Parameter(torch.randn(shape)) for k, shape in way.parameters.items()}
        with megatron_waits(), deferring(wgrad_store):
            result = way.call(torch.randn(way.given, requires_grad=True), dict(parameters))
        with torch.no_grad():
            parameters["w"].mul_(0.5)
        with pytest.raises(
            RuntimeError if wgrad_store is None else PulseError, match="inplace|in place"
        ):
            result.sum().backward()


def test_a_layer_that_adds_to_gradients_while_it_runs_is_refused() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    with deferring(WeightGradStore()), pytest.raises(PulseError, match="torch.autograd.grad"):
        layer(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
