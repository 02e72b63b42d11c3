"""Declared classes as chains: the module's bits, and one process's on two and four devices."""

from __future__ import annotations

import pytest

from megatron_pulse.tracing.derived_layer import DerivedLayer
from tests.tracing.bits import chain_equal_to, skips_of
from tests.tracing.layouts import Layout, train_all
from tests.tracing.subject import Subject
from tests.tracing.zoo import make
from tests.tracing.zoo.declared import TINY, roles_of

SKIPS = {"vace": 3, "i2vgen": 5}
SUMMED = ("hidream", "lumina2", "z_image")
"""Classes whose times are used by so many layers that gradients are added in another order."""
LAYOUTS = (
    Layout("float32"),
    Layout("float32", 2, "sequential", 1, recompute=True),
    Layout("float32", 4),
)


@pytest.mark.parametrize("name", TINY)
def test_a_declared_chain_gives_the_bits_of_its_module(name: str) -> None:
    chain = chain_equal_to(
        *make(name), roles=roles_of(name), rounding=1e-6 if name in SUMMED else 0.0
    )
    assert skips_of(chain) == SKIPS.get(name, 0)
    assert sum(not unit.embedder for unit in chain.units) >= 3


@pytest.mark.parametrize("name", TINY)
def test_a_declared_chain_equals_one_process(name: str) -> None:
    trained, eager = train_all(name, LAYOUTS, 4, steps=2)
    assert not [f"{each.layout}: {fault}" for each in trained for fault in each.faults]
    assert eager["float32"] == pytest.approx(trained[0].reference.losses, rel=1e-4)


def test_two_times_are_spread_within_layers() -> None:
    """Modulation of two times travels, not that of every token."""
    chain = Subject("wan_5b", "float32").chain
    specs = {edge.spec for edge in chain.conditioning}
    assert (2, 6, 24) in {spec.shape for spec in specs}
    assert max(spec.numel_per_sample for spec in specs) == 2 * 6 * 24


def test_parameters_that_no_result_depends_on_are_held_and_frozen() -> None:
    subject = Subject("ltx2", "float32")
    held = {}
    for layer in subject.chain.layers:
        module = layer.build(None)
        assert isinstance(module, DerivedLayer)
        held.update(module.named_parameters())
    assert held.keys() == dict(subject.module.named_parameters()).keys()
    assert not any(p.requires_grad for name, p in held.items() if ".audio_ff." in name)
