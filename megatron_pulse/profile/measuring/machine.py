"""What a process computes with."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_pulse.profile.cautions import rank_threads, said_threads


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def measured_device(device: torch.device, threads: int) -> str:
    """What measurements are of, in words: the GPU, or the processor and how many threads (0: a
    GPU)."""
    name = device_name(device)
    return f"CPU ({name}, {threads} thread{'s' * (threads > 1)})" if threads else name


def driver() -> str:
    """The version of NVIDIA's driver, where its kernel module says it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def device_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_threads(device: torch.device) -> int:
    """How many threads compute on a CPU; 0 for a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 0


def compute_as_a_rank() -> None:
    """Compute with as many threads as a rank, where the environment does not say how many: torch
    takes all cores then, and last bits may depend on that."""
    if said_threads() is None:
        torch.set_num_threads(rank_threads())


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """As many threads in the block (None: as before it)."""
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
    """Let the C library keep what a step on the CPU frees for the next microbatch.

    Else large tensors go back to the kernel and come again zeroed, page by page: 2 to 5 % of a
    step. Once for the process, of its main thread; nothing where the C library is another than
    glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
