"""Classes of diffusers and transformers as chains: the module's bits, and the published skips.

``python -m tests.benchmarks.modules`` has all of the study's, at full depth and in all layouts.
"""

from __future__ import annotations

import pytest
import torch

from tests.tracing.bits import chain_equal_to, skips_of
from tests.tracing.zoo import SKIPS, make


@pytest.mark.parametrize(
    "name", ["small_svd", "hunyuan", "wan", "mochi", "flux", "autoencoder", "t5"]
)
def test_a_chain_gives_the_bits_of_its_module(name: str) -> None:
    chain = chain_equal_to(*make(name))
    assert skips_of(chain) == SKIPS.get(name, 0)
    assert sum(not unit.embedder for unit in chain.units) >= 3


def test_a_chain_of_bf16_gives_the_bits_of_its_module() -> None:
    module, given = make("small_unet", torch.bfloat16)
    assert given(2)["timestep"].dtype == torch.float32
    chain_equal_to(module, given)


def test_a_chain_of_whole_blocks_is_shorter() -> None:
    module, given = make("small_unet")
    blocks, pieces = (chain_equal_to(module, given, pieces=pieces) for pieces in (False, True))
    assert len(blocks.units) < len(pieces.units)
    assert skips_of(blocks) == skips_of(pieces) == SKIPS["small_unet"]
