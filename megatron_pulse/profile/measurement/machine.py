"""Properties of the machine that computes: device, driver, memory, threads."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megatron_pulse.profile.warnings import configured_threads, rank_threads


def device_name(device: torch.device) -> str:
    """Name of the GPU, or model of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def measured_device(device: torch.device, threads: int) -> str:
    """Name of the measured device; for a CPU with ``threads`` (0: a GPU)."""
    name = device_name(device)
    return f"CPU ({name}, {threads} thread{'s' * (threads > 1)})" if threads else name


def driver() -> str:
    """Version of NVIDIA's driver; "unknown" without its kernel module."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def device_memory(device: torch.device, ranks_on_node: int = 1) -> int:
    """Memory in bytes of the GPU; of a CPU this rank's share of the machine's.

    Limits of the control group and of the process (``ulimit -d``, ``ulimit -v``) apply to CPUs.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    limits = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    set_limits = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min([total // ranks_on_node, *set_limits])


def num_threads(device: torch.device) -> int:
    """Number of computing threads on a CPU; 0 for a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 0


def compute_as_a_rank() -> None:
    """Set a rank's number of threads, unless the environment does.

    By default torch uses all cores, and results may differ in the last bits.
    """
    if configured_threads() is None:
        torch.set_num_threads(rank_threads())


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """Use ``threads`` threads within the context (None: unchanged)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST_KEPT = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep memory freed by a step on the CPU for the next microbatch.

    Otherwise large tensors return to the kernel and come back zeroed page by page, which costs a
    few percent of a step. Takes effect once per process, from its main thread. Without glibc it
    does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
