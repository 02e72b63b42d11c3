"""Transformers, an autoencoder and text encoders as chains: the module's bits."""

from __future__ import annotations

import pytest

from tests.backbone.derived.bits import chain_equal_to, skips_of
from tests.backbone.derived.zoo import SKIPS, ZOO, make

NAMES = [name for name in ZOO if "unet" not in name and name not in ("sd", "sdxl", "svd")]


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_gives_the_bits_of_its_module(name: str) -> None:
    module, given = make(name)
    chain = chain_equal_to(module, given, output=0 if name == "clip" else None)
    assert skips_of(chain) == SKIPS.get(name, 0)
    assert sum(not unit.embedder for unit in chain.units) >= 3
