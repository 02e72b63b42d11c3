"""Chains of small modules are derived here, as those that import the package get them."""

from collections.abc import Iterator

import pytest

from megatron_pulse.tracing import chains
from megatron_pulse.tracing.cache import chain_cache
from megatron_pulse.tracing.checks import module_state


@pytest.fixture(scope="package", autouse=True)
def derived_each_time() -> Iterator[None]:
    """Undo ``tests.remembered.cache_small_chains`` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "is_small", module_state.is_small)
        patch.setattr(chains, "cached_chain", chain_cache.cached_chain)
        yield
