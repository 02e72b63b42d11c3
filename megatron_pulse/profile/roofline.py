"""Device peaks, and estimated kernel times by the roofline model.

Williams, Waterman and Patterson, "Roofline" (CACM 2009): a kernel's time is that of its operations
or of its bytes, whichever is longer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Supported dtypes of profiles, with bytes per element."""

USABLE = 0.9
"""Fraction of a GPU's memory that plans may use.

The rest is for CUDA's context, NCCL's buffers and kernel workspaces, which are not measured.
"""


class Kernel(NamedTuple):
    """Floating-point operations of one kernel, and bytes that it reads and writes."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Device:
    """Peaks of a device: dense operations per second by dtype, memory bandwidth in bytes per
    second, memory in bytes.
    """

    name: str
    peak_flops: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int

    @property
    def half_dtype(self) -> str:
        """16-bit dtype for training: bfloat16 if the device supports it."""
        return "bfloat16" if "bfloat16" in self.peak_flops else "float16"

    def dtype_faults(self, flag: str, dtype: str | None) -> list[str]:
        """Fault if the peak of ``dtype``, given as ``flag``, is unknown."""
        if dtype is None or dtype in self.peak_flops:
            return []
        known = ", ".join(self.peak_flops)
        return [f"{flag} {dtype}: no peak of {self.name} is known, only of: {known}"]


# Dense figures, without sparsity; float32 is without TF32.
# V100: NVIDIA Tesla V100 data sheet (SXM2). Neither it nor the Ascend 910A has bfloat16.
# Ascend 910A: Huawei's announcement of August 2019 (256 TFLOP/s at half precision) and Hot Chips
# 31 (HBM2, 1.2 TB/s); no float32 figure is published.
# A100: NVIDIA A100 data sheets (SXM). H100 and H200: their data sheets (SXM).
_PRESETS = (
    Device("V100-32GB", {"float16": 125e12, "float32": 15.7e12}, 0.9e12, 32 * 10**9),
    Device(
        "4090-24GB",
        {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12},
        1.008e12,
        24 * 10**9,
    ),
    Device("Ascend-910A-32GB", {"float16": 256e12}, 1.2e12, 32 * 10**9),
    Device(
        "A100-40GB",
        {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        1.555e12,
        40 * 10**9,
    ),
    Device(
        "A100-80GB",
        {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        2.039e12,
        80 * 10**9,
    ),
    Device(
        "H100", {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}, 3.35e12, 80 * 10**9
    ),
    Device(
        "H200", {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}, 4.8e12, 141 * 10**9
    ),
)
PRESETS: Mapping[str, Device] = {device.name: device for device in _PRESETS}


def known_device(cuda_name: str) -> Device | None:
    """Preset of a GPU from its CUDA name; None without a preset of the same peaks.

    A name made of figures (``custom_device``) is that device. Else the preset's name must be a word
    of the CUDA name: an RTX A1000 is no A100. PCIe and laptop cards, an RTX 4090 D, and parts of a
    GPU (MIG) are slower. A different memory size is a different device.
    """
    if figures := re.fullmatch(rf"([\d.e+-]+){FIGURES}([\d.e+-]+) GB/s, ([\d.e+-]+) GB", cuda_name):
        return custom_device(*map(float, figures.groups()))
    words = re.split(r"[^A-Za-z0-9]+", cuda_name)
    if {"PCIe", "PCIE", "NVL", "MIG", "Laptop", "D"} & {*words}:
        return None
    sizes = {word for word in words if re.fullmatch(r"\d+GB", word)}
    found = [
        device
        for name, device in PRESETS.items()
        if name.split("-")[0] in words and sizes <= {f"{device.memory_bytes // 10**9}GB"}
    ]
    return found[0] if len(found) == 1 else None


FIGURES = " TFLOP/s, "
"""Marker in the names of devices known only by figures."""


def peaks_name(tflops: float, bandwidth_gbs: float) -> str:
    """Name of a device with these figures, without its memory."""
    return f"{tflops:g}{FIGURES}{bandwidth_gbs:g} GB/s"


def custom_device(peak_tflops: float, bandwidth_gbs: float, memory_gb: float) -> Device:
    """Device with these figures; the peak applies to every dtype."""
    name = f"{peaks_name(peak_tflops, bandwidth_gbs)}, {memory_gb:g} GB"
    peak = dict.fromkeys(ELEMENT_BYTES, peak_tflops * 1e12)
    return Device(name, peak, bandwidth_gbs * 1e9, round(memory_gb * 1e9))


@dataclass(frozen=True)
class Roofline:
    """Estimated times on a device that reaches a fraction of its peaks.

    - ``compute_efficiency``: fraction of peak operations reached by large matrix products and
      convolutions.
    - ``bandwidth_efficiency``: fraction of peak bandwidth.
    - ``launch_s``: seconds added per kernel.

    Defaults are round numbers of typical size, not measurements; they serve for ratios between
    layers. Raises ValueError for a dtype without a known peak.
    """

    device: Device
    dtype: str
    compute_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    launch_s: float = 4e-6

    def __post_init__(self) -> None:
        if self.dtype not in self.device.peak_flops:
            raise ValueError(
                f"the peak of {self.device.name} at {self.dtype} is not known; known are: "
                + ", ".join(self.device.peak_flops)
            )

    @property
    def method(self) -> str:
        """Description of the assumptions."""
        peak = self.device.peak_flops[self.dtype]
        return (
            f"roofline: {self.compute_efficiency:g} of {peak / 1e12:g} TFLOP/s, "
            f"{self.bandwidth_efficiency:g} of {self.device.bytes_per_s / 1e9:g} GB/s, "
            f"{self.launch_s * 1e6:g} us for each kernel"
        )

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """Total time of ``kernels``, one after another."""
        rate = self.compute_efficiency * self.device.peak_flops[self.dtype]
        bandwidth = self.bandwidth_efficiency * self.device.bytes_per_s
        return sum(
            self.launch_s + max(kernel.flops / rate, kernel.num_bytes / bandwidth)
            for kernel in kernels
        )
