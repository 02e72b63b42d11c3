"""Modules that do what diffusers' do not: right to the bit, or refused with the line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import megatron_pulse as pulse
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing import strange, unlike
from tests.tracing.bits import chain_equal_to, skips_of
from tests.tracing.strange import WIDTH, Strange
from tests.tracing.unlike import RIGHT, Flat, Volume


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name: str) -> None:
    torch.manual_seed(0)
    make, links, skips = RIGHT[name]
    chain = chain_equal_to(*make())
    assert sum(not unit.embedder for unit in chain.units) == links
    assert skips_of(chain) == skips


@pytest.mark.parametrize(
    "what, said, code",
    [
        (strange.tripled, "Tripled is an autograd.Function", "apply"),
        (strange.bound_before, "Tripled is an autograd.Function", "bound(x)"),
        (strange.hooked, "a tensor's gradient has a hook", "register_hook"),
        (strange.counted, "calls was 0 before the call and is 1 after it", ""),
        (strange.listed, "lists['calls'][0] was 0 before the call and is 1 after it", ""),
        (strange.counted_beside, "SEEN['calls'] was 0 before the call and is 1 after it", ""),
        (strange.held, "last['x'] is created by the call", ""),
        (strange.cached, "first is created in forward and kept", ""),
        (strange.of_a_gradient, "torch.func's transforms (grad, vjp) in forward", ""),
        (strange.drawn, "chance is replaced by the call", ""),
        (strange.drawn_by_numpy, "generator is replaced by the call", ""),
        (strange.numbered, "numbers is replaced by the call", ""),
        (strange.shaken, "Python draws random numbers", ""),
        (strange.shaken_by_numpy, "numpy draws random numbers", ""),
        (strange.chosen, "not a tensor of known size", ""),
        (strange.outside, "torch.export cannot follow it", ""),
        (strange.hooked_behind, "a tensor's gradient has a hook", "register_hook"),
        (strange.hooked_before, "a tensor's gradient has a hook", "register_prehook"),
        (strange.packed, "change saved tensors of backward", "with"),
        (strange.timed, "two calls of it with the same inputs differ", ""),
        (strange.of_math, "the choice of attention kernels (sdpa_kernel)", "with"),
        (strange.doubled, "the default dtype is set in forward", "float64"),
        (
            strange.without_cudnn,
            "the use of cuDNN (torch.backends.cudnn) is set in forward",
            "with torch",
        ),
        (strange.benched, "(torch.backends.cudnn) is set in forward", "benchmark = True"),
        (strange.rounded, "the precision of fp32 (allow_tf32, set_float", '"medium"'),
        (strange.mapped, "torch.vmap, at", ""),
        (strange.branched, "torch.cond, at", ""),
        (strange.normed_in_a_region, "Call eval() on the module", ""),
        (strange.by_data, "write .detach()", "x.data"),
        (strange.inferred, "torch.inference_mode at", "with torch"),
        (strange.inferred_by_decorator, "torch.inference_mode at", "scaled(x)"),
    ],
)
def test_it_is_refused(what: Callable[..., torch.Tensor], said: str, code: str) -> None:
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(*unlike.rows(Strange(what))[:2], sample="x")
    assert said in str(caught.value)
    lines, first = inspect.getsourcelines(what)
    number = first + next(i for i, line in enumerate(lines) if code in line)
    assert not code or f"{strange.__file__}:{number}" in str(caught.value)


def test_dropout_of_nothing_and_slots_are_taken() -> None:
    module, given, _ = unlike.rows(strange.Recurrent())
    chain_equal_to(module, given, "x")
    pulse.from_module(strange.Slotted(*module.blocks), given, sample="x")


def test_settings_that_are_so_outside_are_taken() -> None:
    chain_equal_to(*unlike.rows(Strange(strange.as_outside)))


def test_norms_that_each_call_changes_are_refused_and_taken_as_they_are() -> None:
    """The modified buffers are named, although the write happens in a region without gradients."""
    module, given, sample = unlike.rows(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), spectral_norm(nn.Linear(WIDTH, 3)))
    )
    given = {"input": given[sample]}
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(module, given, sample="input")
    remedy = "call eval() on 1.parametrizations, so that they leave it unchanged"
    for fault, name in zip(caught.value.faults, ("_u", "_v"), strict=True):
        assert fault.startswith(f"div.out writes to 1.parametrizations.weight.0.{name}, at ")
        assert fault.endswith(remedy)
    module[1].parametrizations.eval()
    chain_equal_to(module, given, "input")
    old = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.utils.spectral_norm(nn.Linear(WIDTH, 3)))
    with pytest.raises(DerivationError, match=r"use torch\.nn\.utils\.parametrizations"):
        pulse.from_module(old, given, sample="input")


def test_results_that_a_function_keeps_stay_whole() -> None:
    module, given, _ = unlike.rows(Strange(strange.looked_up))
    strange.looked_up(module, torch.zeros(2, strange.WIDTH))
    chain_equal_to(module, given, "x")
    assert strange.looked_up(module, torch.zeros(2, strange.WIDTH)).sum().item() != 0


def test_a_reentrant_checkpoint_is_refused() -> None:
    module, given, sample = unlike.volume(Volume(reentrant=True))
    with pytest.raises(DerivationError, match="use_reentrant=False") as caught:
        pulse.from_module(module, given, sample=sample)
    assert caught.value.faults[0].startswith(f"checkpoint at {unlike.__file__}:")


def test_hooks_of_gradients_are_refused_all_at_once() -> None:
    module, given, sample = unlike.rows(Flat())
    module.layers[2].register_full_backward_hook(lambda *_: None)
    module.layers[3].register_full_backward_hook(lambda *_: None)
    module.layers[3].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(module, given, sample=sample)
    assert caught.value.faults == [
        "layers.2 has hooks of its backward pass: they are not traced (and of 1 more like it)",
        "the gradient of layers.3.weight has a hook, which its copy in a chain would lack",
    ]


def test_causes_are_listed_and_not_what_follows_from_them() -> None:
    """An export that fails within what is refused; the count of a norm that keeps statistics, but
    not what only has that name."""
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(*unlike.rows(Strange(strange.tripled_outside))[:2], sample="x")
    (fault,) = caught.value.faults
    assert fault.startswith("Outside is an autograd.Function, at ")
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    module = nn.Sequential(nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)))
    given = {"input": torch.randn(3, WIDTH)}
    with pytest.raises(DerivationError) as caught:
        pulse.from_module(module, given, sample="input")
    (fault,) = caught.value.faults
    assert fault.startswith("batch_norm.default updates running statistics, at ")
    assert fault.endswith("(and of 1 more like it)")
    counting = Strange(strange.counting)
    counting.register_buffer("num_batches_tracked", torch.zeros(()))
    with pytest.raises(DerivationError, match=r"add_.Tensor writes to num_batches_tracked"):
        pulse.from_module(*unlike.rows(counting)[:2], sample="x")


def test_parameters_of_two_dtypes_are_refused() -> None:
    module, given, sample = unlike.rows(Flat())
    module.layers[3].half()
    with pytest.raises(DerivationError, match="float32 and float16, but a run has one dtype"):
        pulse.from_module(module, given, sample=sample)


class Named(nn.Module):
    """Looks words up, which a trace of shapes does with any numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.end = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.end(x + self.words(words))


def test_a_module_that_raises_on_its_example_is_refused() -> None:
    given = {"x": torch.zeros(2, WIDTH), "words": torch.tensor([1, 4])}
    with pytest.raises(
        DerivationError, match=r"call with its example fails: IndexError: index out"
    ):
        pulse.from_module(Named(), given, sample="x")
