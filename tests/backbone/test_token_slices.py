"""Token-wise work in slices: the numbers of whole tokens, from inputs alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.backbone.token_slices import TokenSlices, slice_counts
from megatron_pulse.runtime.activations.recompute import RecomputedLayer

TOKENS, WIDTH = 7, 4
CALLS: list[int] = []


def work(x: Tensor, scale: Tensor, weight: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """``x [b, s, w]``, scale ``[b, 1, w]``, and a time ``[s, b]`` for every token."""
    CALLS.append(x.shape[1])
    hidden = F.gelu(F.linear(F.layer_norm(x, (WIDTH,)) * (1 + scale), weight))
    return x + hidden * times.T[..., None], hidden.transpose(1, 2)


def given(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, TOKENS, WIDTH), (2, 1, WIDTH), (WIDTH, WIDTH), (TOKENS, 2)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def sliced(count: int) -> TokenSlices:
    counts = slice_counts(TOKENS, count)
    return TokenSlices((work,) * len(counts), counts, (1, None, None, 0), (1, 2))


def gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    loss = sum((i + 1) * r.double().square().mean() for i, r in enumerate(results))
    assert isinstance(loss, Tensor)
    return torch.autograd.grad(loss, inputs)


def test_slice_counts_are_even_but_for_one() -> None:
    assert slice_counts(7, 3) == (3, 2, 2)
    assert slice_counts(2, 4) == (1, 1)
    assert slice_counts(5, 1) == (5,)


@pytest.mark.parametrize("count", [1, 2, 3, TOKENS, 20])
def test_results_and_gradients_are_those_of_whole_tokens(count: int) -> None:
    inputs = given(torch.float64)
    whole, parts = work(*inputs), sliced(count)(*inputs)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-15)
        assert other.stride() == one.stride()
    for one, other in zip(gradients(whole, inputs), gradients(parts, inputs), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-15)


def test_sums_over_slices_are_rounded_once() -> None:
    """As a product of whole tokens sums in fp32, one rounding of a slice's own aside."""
    inputs, exact = given(torch.bfloat16), given(torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in exact]
    of_exact = gradients(work(*exact), exact)[2]
    errors = [
        float((gradients(call(*inputs), inputs)[2].double() - of_exact).abs().max())
        for call in (work, sliced(TOKENS))
    ]
    assert errors[1] < 2 * errors[0]


def test_only_what_needs_a_gradient_gets_one() -> None:
    inputs = given(torch.float64)
    inputs[2].requires_grad_(False)
    first, second = sliced(2)(*inputs)
    first.sum().backward()
    assert inputs[2].grad is None and inputs[0].grad is not None and not second.is_leaf
    with torch.no_grad():
        assert not sliced(2)(*inputs)[0].requires_grad


def test_backward_keeps_the_inputs_alone() -> None:
    inputs, saved = given(torch.float64), list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = sliced(3)(*inputs)
    assert [each.data_ptr() for each in saved] == [each.data_ptr() for each in inputs]
    del results


def test_a_recomputed_layer_does_not_run_its_last_part_again() -> None:
    inputs = given(torch.float64)

    def layer() -> Tensor:
        first = sliced(2)(*inputs)[0]
        return sliced(2)(first, *inputs[1:])[0]

    CALLS.clear()
    result = RecomputedLayer("layer", layer, dict).forward()
    assert CALLS == [4, 3] * 2
    CALLS.clear()
    result.sum().backward()
    assert CALLS == [4, 3] * 3  # the first part for the inputs of the second, and either backward
