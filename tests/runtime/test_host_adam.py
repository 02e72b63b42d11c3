"""Adam on the processor: the same bits however parameters are cut, and Adam's numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_pulse.runtime.parameters.adam import HostAdam

HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 3


def _moved(pieces: list[Tensor], gradients: list[list[Tensor]]) -> Tensor:
    """Pieces after ``STEPS`` steps, joined."""
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    adam = HostAdam(parameters, **HOW)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        adam.step()
    return torch.cat([p.detach().view(-1) for p in parameters])


def _drawn(numel: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(numel)
    drawn = [torch.randn(numel, generator=generator) for _ in range(1 + STEPS)]
    return drawn[0], drawn[1:]


@given(
    numel=st.integers(1, 700),
    cuts=st.lists(st.integers(1, 699), max_size=6, unique=True),
    threads=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_bits_do_not_depend_on_cuts(numel: int, cuts: list[int], threads: int) -> None:
    weights, gradients = _drawn(numel)
    ends = [0, *sorted(cut for cut in cuts if cut < numel), numel]
    sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cut = _moved(list(weights.split(sizes)), [list(g.split(sizes)) for g in gradients])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(cut, _moved([weights], [[g] for g in gradients]))


def test_bits_do_not_depend_on_threads() -> None:
    weights, gradients = _drawn(300_001)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(_moved([weights], [[g] for g in gradients]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_numbers_are_adams() -> None:
    """Beside Loshchilov and Hutter's algorithm 2 in double precision."""
    weights, gradients = _drawn(1_001)
    expected, first, second = weights.double(), 0.0, 0.0
    (beta1, beta2), rate = HOW["betas"], HOW["lr"]
    for step, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient.double()
        second = beta2 * second + (1 - beta2) * gradient.double() ** 2
        root = (second / (1 - beta2**step)).sqrt() + HOW["eps"]
        expected = expected * (1 - rate * HOW["weight_decay"])
        expected = expected - rate * first / (1 - beta1**step) / root
    found = _moved([weights], [[g] for g in gradients]).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_what_has_no_gradient_stays_and_groups_have_their_own_rates() -> None:
    still, slow, fast = (torch.nn.Parameter(torch.ones(70)) for _ in range(3))
    adam = HostAdam([{"params": [still, slow], "lr": 1e-3}, {"params": [fast], "lr": 1e-2}])
    slow.grad = fast.grad = torch.ones(70)
    adam.step()
    assert torch.equal(still, torch.ones(70)) and not adam.state[still]
    assert (1 - fast).mean().item() == pytest.approx(10 * (1 - slow).mean().item(), rel=1e-3)
