"""UNets as chains: the module's bits, and the skips that are published."""

from __future__ import annotations

import pytest

from tests.backbone.derived.bits import chain_equal_to, skips_of
from tests.backbone.derived.zoo import SKIPS, make


@pytest.mark.parametrize("name", ["sd", "sdxl", "svd"])
def test_a_chain_gives_the_bits_of_its_module(name: str) -> None:
    chain = chain_equal_to(*make(name))
    assert skips_of(chain) == SKIPS[name]
    assert len(chain.units) > 2 * SKIPS[name]


def test_a_chain_of_bf16_gives_the_bits_of_its_module() -> None:
    module, given = make("small_unet")
    given = {name: t.bfloat16() for name, t in given.items()}
    chain_equal_to(module.bfloat16(), given)


def test_a_chain_of_whole_blocks_is_shorter() -> None:
    module, given = make("small_unet")
    blocks, pieces = (chain_equal_to(module, given, pieces=pieces) for pieces in (False, True))
    assert len(blocks.units) < len(pieces.units)
    assert skips_of(blocks) == skips_of(pieces) == 4
