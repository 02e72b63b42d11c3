"""What is done to the machine that is measured and trained on."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from megatron_pulse.profile.measuring.machine import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_large_tensors_of_a_step_come_from_those_of_the_step_before() -> None:
    """Beyond 32 MiB glibc would ask the kernel for zeroed pages every time."""
    keep_freed_memory()

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    rows = []
    for _ in range(4):
        before = faults()
        kept = [torch.ones(12 * 1024 * 1024) for _ in range(2)]  # 48 MiB each
        del kept
        rows.append(faults() - before)
    assert min(rows[1:]) < 1000, rows  # 24,576 pages of 4 KiB
