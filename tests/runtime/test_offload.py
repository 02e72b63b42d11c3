"""Activations on the host: the same bits come back, and the device lets go of them meanwhile."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_pulse.runtime.activations.offload import LEAST_BYTES, ActivationOffload, storages


class _Layer(nn.Module):
    """Saves views of one storage, a strided one, an index, its weight and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.made: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, dim=-1)
        order = torch.argsort(q.detach(), dim=-1)
        mixed = torch.softmax(q.gather(-1, order).transpose(0, 1), dim=-1) * k.transpose(0, 1)
        self.made = [weakref.ref(each.untyped_storage()) for each in (q, mixed)]
        return torch.nn.functional.silu(self.out(mixed.transpose(0, 1) + v.square()))


def gradients(fetched: bool | None) -> tuple[list[Tensor], ActivationOffload | None, list[bool]]:
    """Gradients of a layer's input and weights.

    Unless ``fetched`` is None, saved tensors are offloaded, and the second result tells whether
    their storages were freed.
    """
    torch.manual_seed(0)
    layer, x = _Layer(), torch.randn(16, 8, 64, requires_grad=True)
    away, gone = None, []
    if fetched is None:
        y = layer(x)
    else:
        away = ActivationOffload(storages([x, *layer.parameters()]))
        with away.saving("the layer"):
            y = layer(x)
        away.start_offload()
        assert any(made() is not None for made in layer.made)  # on its way
        away.finish_offload()
        gone = [made() is None for made in layer.made]
        if fetched:
            away.start_load()
    y.square().sum().backward()
    return [g for g in (x.grad, *(p.grad for p in layer.parameters())) if g is not None], away, gone


@pytest.mark.parametrize("fetched", [True, False])
def test_the_same_bits_come_back(fetched: bool) -> None:
    expected, _, _ = gradients(None)
    got, away, gone = gradients(fetched)
    assert len(got) == 5 and all(map(torch.equal, got, expected))
    assert all(gone) and away is not None and away.num_bytes >= 4 * 16 * 8 * 64


def test_what_others_hold_stays() -> None:
    x = torch.randn(LEAST_BYTES, requires_grad=True)
    small = torch.ones(4, requires_grad=True)
    away = ActivationOffload(storages([x]))
    with away.saving("the layer"):
        y = (x * x).sum() + (small * small).sum()
    away.start_offload()
    away.finish_offload()
    assert away.num_bytes == 0
    y.backward()
    assert torch.equal(x.grad, 2 * x)


def test_taken_twice_is_brought_twice() -> None:
    x = torch.randn(LEAST_BYTES, requires_grad=True)
    away = ActivationOffload(frozenset())
    with away.saving("the layer"):
        y = x.exp()
    away.start_offload()
    away.finish_offload()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second) and torch.equal(first, y)


class _Conjugated(nn.Module):
    """Saves tensors whose storages have other values than they."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(64, 32, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x @ torch.view_as_real(self.turned).flatten(1), dim=-1)
        conjugated = spectrum.conj()
        negated = conjugated.imag
        return (conjugated * torch.exp(conjugated * 1e-3)).real * negated.sigmoid() * negated


def test_conjugated_and_negated_views_are_so_again() -> None:
    torch.manual_seed(0)
    layer, x = _Conjugated(), torch.randn(16, 64)
    found = []
    for away in (None, ActivationOffload(storages([x, *layer.parameters()]))):
        with away.saving("the layer") if away is not None else nullcontext():
            y = layer(x)
        if away is not None:
            away.start_offload()
            away.finish_offload()
        (gradient,) = torch.autograd.grad(y.sum(), layer.turned)
        found.append(gradient)
    assert away is not None and away.num_bytes > 0
    assert torch.equal(*found)
