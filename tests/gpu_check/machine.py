"""Looks at this machine; run as a process, so that who asks never imports torch.

python -m tests.gpu_check.machine
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys

from megatron_pulse.profile.measurement.machine import driver
from tests.gpu_check.check import Machine
from tests.launch.sessions import ROOT

PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "apex",
    "diffusers",
    "transformers",
    "triton",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
SHARING = (2, 30)
"""From this NCCL on two ranks may share a GPU, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set."""


def look() -> Machine:
    """What is here."""
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    versions["processors"] = str(len(os.sched_getaffinity(0)))
    if not torch.cuda.is_available():
        return Machine((), False, versions)
    nccl = loaded_nccl() or torch.cuda.nccl.version()
    versions |= {
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, nccl)),
        "driver": driver(),
    }
    names = []
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        names.append(about.name)
        versions[f"GPU {i}"] = (
            f"{about.name}, {about.total_memory / 1e9:.1f} GB, "
            f"compute {about.major}.{about.minor}, {about.multi_processor_count} multiprocessors"
        )
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return Machine(tuple(names), asked and tuple(nccl[:2]) >= SHARING, versions)


def loaded_nccl() -> tuple[int, int, int] | None:
    """The version of the NCCL that this process has loaded; torch knows which it was built with."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10000)
    return None if status else (major, *divmod(rest, 100))


def ask() -> Machine:
    """What a process that looks says; RuntimeError with its words if it cannot."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_check.machine"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if said.returncode:
        raise RuntimeError(f"this machine cannot be looked at:\n{said.stderr.strip()}")
    return Machine.parse(said.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(look().to_text())
