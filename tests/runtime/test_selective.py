"""Cheap saved tensors are dropped, and recomputed with the same bits."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megatron_pulse.runtime.activations.selective_recompute import LEAST_BYTES, SelectiveRecompute
from megatron_pulse.runtime.failure_board import PulseError
from tests.runtime.equality import counting_made

SIZE = 64


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by what tells storages apart."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def gradients(
    run: Callable[[Tensor, nn.ParameterList], Tensor], selective: bool, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of an input and of weights used by ``run``, and the kept tensors."""
    torch.manual_seed(seed)
    weights = nn.ParameterList(torch.randn(SIZE, SIZE) / 8 for _ in range(4))
    x = torch.randn(32, SIZE, requires_grad=True)
    kept: list[Tensor] = []
    if selective:
        layer = SelectiveRecompute("it", weights)
        with layer.saving():
            result = run(x, weights)
        kept = layer.tensors
    else:
        result = run(x, weights)
    result.sin().sum().backward()
    return [p.grad for p in (x, *weights) if p.grad is not None], kept


def feed_forward(x: Tensor, w: nn.ParameterList) -> Tensor:
    normed = F.layer_norm(x, (SIZE,))
    return x + F.gelu(normed @ w[0]) @ w[1]


def gated(x: Tensor, w: nn.ParameterList) -> Tensor:
    scale, shift = x.mean(0), x[0] * 2
    normed = F.layer_norm(x, (SIZE,)) * (1 + scale) + shift
    return (F.silu(normed @ w[0]) * (normed @ w[1])) @ w[2]


def convolved(x: Tensor, w: nn.ParameterList) -> Tensor:
    image = F.silu(F.group_norm(x.view(1, 8, 16, 16), 4))
    kernel = w[0].flatten()[: 8 * 8 * 9].view(8, 8, 3, 3)
    image = F.interpolate(F.conv2d(image, kernel, padding=1), scale_factor=2.0)
    return F.conv2d(image, kernel, padding=1)


def written_into(x: Tensor, w: nn.ParameterList) -> Tensor:
    made = F.relu(x.detach()).add_(1)
    held = x.detach().clone()
    last = held * 2
    held.zero_()
    return (x @ w[0]) * made * last


def random_in_it(x: Tensor, w: nn.ParameterList) -> Tensor:
    return F.dropout(F.gelu(x @ w[0]), 0.5) @ w[1]


@pytest.mark.parametrize(
    ("run", "share"),
    [
        (feed_forward, 0.6),
        (gated, 0.7),
        (convolved, 0.6),
        (written_into, 1.0),
        (random_in_it, 1.0),
    ],
)
def test_same_bits_and_less_kept(run: Any, share: float) -> None:
    expected, _ = gradients(run, False)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.shape != (SIZE, SIZE):
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        again, _ = gradients(run, False)
    assert all(map(torch.equal, expected, again))
    with counting_made() as made:
        got, kept = gradients(run, True)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    assert bool(made) == (share < 1)
    assert sum(storages(kept).values()) <= share * sum(storages(saved).values()) + 1


def random_layer(seed: int) -> Callable[[Tensor, nn.ParameterList], Tensor]:
    """Cheap and dear operators at random, each of some results before it."""
    choices: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda a, b, w: F.gelu(a),
        lambda a, b, w: F.silu(a) * b,
        lambda a, b, w: a + b,
        lambda a, b, w: F.layer_norm(a, (SIZE,)),
        lambda a, b, w: a @ w,
        lambda a, b, w: torch.softmax(a @ b.T, -1) @ b,
        lambda a, b, w: torch.cat([a, b], -1)[:, ::2],
        lambda a, b, w: (a.to(torch.float64) * 3).to(torch.float32) - b,
        lambda a, b, w: a.view(16, 2 * SIZE).transpose(0, 1).reshape(32, SIZE).sigmoid(),
        lambda a, b, w: a.clone().mul_(2).tanh(),
        lambda a, b, w: F.rms_norm(a, (SIZE,)) / (2 + b.tanh()),
        lambda a, b, w: (a * 2).add_(b).neg() @ w,
    ]

    def run(x: Tensor, weights: nn.ParameterList) -> Tensor:
        rng = random.Random(seed)
        results = [x]
        for _ in range(rng.randint(3, 14)):
            a, b = rng.choice(results[-4:]), rng.choice(results)
            results.append(rng.choice(choices)(a, b, rng.choice(list(weights))))
        return torch.stack(results[-3:]).sum(0)

    return run


def test_random_layers_have_the_same_bits() -> None:
    less = 0
    for seed in range(150):
        run = random_layer(seed)
        expected, _ = gradients(run, False, seed)
        with counting_made() as made:
            got, _ = gradients(run, True, seed)
        less += bool(made)
        assert len(got) == len(expected), seed
        pairs = zip(got, expected, strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs), seed
    assert less > 75


def test_what_is_left_out_is_let_go_and_made_once_for_all_that_take_it() -> None:
    layer, x = SelectiveRecompute("it", ()), torch.randn(32, SIZE, requires_grad=True)
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    with layer.saving():
        hidden = F.gelu(x)
        gone = weakref.ref(hidden.untyped_storage())
        first, second = hidden @ w, hidden.sigmoid() @ w
        del hidden
    del layer
    assert gone() is None
    with counting_made() as made:
        (first + second).sum().backward()
    assert len(made) >= 3 and x.grad is not None


def test_small_and_constant_tensors_stay() -> None:
    few = torch.randn(LEAST_BYTES // 4 - 1, requires_grad=True)
    layer = SelectiveRecompute("it", [few])
    with layer.saving():
        result = few.sigmoid() * few
    assert len(storages(layer.tensors)) == 1
    with counting_made() as made:
        result.sum().backward()
    assert not made


def test_what_is_written_into_since_is_said() -> None:
    """The written tensor was saved, is an operand of a saved one, or is a weight."""
    for write in range(4):
        layer, (x, y) = (
            SelectiveRecompute("it", [w := torch.randn(SIZE, SIZE, requires_grad=True)]),
            (torch.randn(32, SIZE, requires_grad=True) for _ in range(2)),
        )
        with layer.saving():
            hidden = x @ w
            result = F.gelu(hidden) @ w + y.to(torch.float64).sin().to(torch.float32)
        with torch.no_grad():
            (x, hidden, w, y)[write].add_(1)
        with pytest.raises(PulseError, match="layer it: .* modified in place after forward"):
            result.sum().backward()


def test_what_writes_and_does_not_say_so_is_noticed_within_the_layer() -> None:
    """Its version is another at the end."""
    found = []
    for selective in (False, True):
        torch.manual_seed(0)
        x = torch.randn(32, SIZE, requires_grad=True)
        mean = torch.zeros(32, SIZE)
        with SelectiveRecompute("it", [mean]).saving() if selective else nullcontext():
            result = (x + mean) * x
            with _disable_current_modes():
                mean.add_(1)
        found.append(torch.autograd.grad(result.sum(), x))
    assert torch.equal(*found[0], *found[1])


def test_buffers_are_saved_as_they_are() -> None:
    """The next microbatch may change them."""
    x, mean = torch.randn(32, SIZE, requires_grad=True), torch.zeros(SIZE)
    expected = torch.autograd.grad(((x - mean) * x.sigmoid()).sum(), x)
    layer = SelectiveRecompute("it", (), [mean])
    with layer.saving():
        result = (x - mean) * x.sigmoid()
    mean.add_(1)
    assert torch.equal(*expected, *torch.autograd.grad(result.sum(), x))


def test_long_sums_are_not_followed_for_ever() -> None:
    x = torch.randn(32, SIZE, requires_grad=True)
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    gradients = []
    for selective in (False, True):
        h = x
        with SelectiveRecompute("it", [w]).saving() if selective else nullcontext():
            for _ in range(40):
                h = h + h * 0.01
            for _ in range(1200):
                h = h + 0.01
            result = h @ w
        gradients.append(torch.autograd.grad(result.sum(), [x, w]))
    assert all(map(torch.equal, *gradients))


def test_memory_goes_as_the_backward_does() -> None:
    x, alive = torch.randn(32, SIZE, requires_grad=True), []
    held: list[Any] = []
    with SelectiveRecompute("it", ()).saving():
        h = x
        for _ in range(5):
            h = torch.softmax(h, -1)
            held.append(weakref.ref(h.untyped_storage()))
            h.register_hook(lambda _: alive.append(sum(each() is not None for each in held)))
    h, result = None, h.sum()
    result.backward()
    assert alive == sorted(alive, reverse=True) and alive[-1] <= 2


def test_complex_and_sparse_tensors_are_left_alone() -> None:
    a, b, w = (torch.randn(SIZE, SIZE, dtype=torch.complex64, requires_grad=True) for _ in range(3))
    adjacent = (torch.rand(SIZE, SIZE) > 0.9).float().to_sparse()
    real = torch.randn(SIZE, SIZE, requires_grad=True)
    found = []
    for selective in (False, True):
        with SelectiveRecompute("it", [w]).saving() if selective else nullcontext():
            result = ((a * b).conj() * 2).tanh() @ w
            more = torch.sparse.mm(adjacent, F.gelu(real))
        total = result.abs().sum() + more.sin().sum()
        found.append(torch.autograd.grad(total, [a, b, w, real]))
    assert all(map(torch.equal, *found))


def test_taken_twice_is_made_twice() -> None:
    x = torch.randn(32, SIZE, requires_grad=True)
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    layer = SelectiveRecompute("it", [w])
    with layer.saving():
        result = (F.gelu(x) @ w).sum()
    (first,) = torch.autograd.grad(result, w, retain_graph=True)
    (second,) = torch.autograd.grad(result, w)
    assert torch.equal(first, second)
