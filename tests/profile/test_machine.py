"""Settings of the measuring machine."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from megatron_pulse.profile.measurement.machine import keep_freed_memory
from tests.ranks import run_ranks


def page_faults() -> list[int]:
    """Page faults of allocating and freeing 48 MiB eight times.

    Beyond 32 MiB glibc would ask the kernel for zeroed pages every time.

    Each time 64 KiB less: an aligned tensor takes a hole of some bytes more than it has, and a
    hole of its own size is whole again only if nothing small was put behind it.
    """
    keep_freed_memory()
    counts = []
    for n in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12 * 1024 * 1024 - n * 16 * 1024)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_large_tensors_of_a_step_come_from_those_of_the_step_before() -> None:
    (counts,) = run_ranks(1, page_faults)  # in its main thread, as steps are
    assert max(counts[1:]) < 1000, counts  # of 12,176 pages of 4 KiB at least
