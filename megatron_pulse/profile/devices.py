"""How fast a device could be, and how long work then takes: the roofline model.

Williams, Waterman and Patterson, "Roofline" (CACM 2009): a kernel takes as long as its operations
or as its bytes, whichever is longer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that a profile can be of, and the bytes of their elements."""

USABLE = 0.9
"""What a plan may put into a GPU's memory: the rest is for CUDA's context, NCCL's buffers and the
workspaces of kernels, which have not been measured."""


class Kernel(NamedTuple):
    """One kernel's floating-point operations, and the bytes that it reads and writes."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Device:
    """Peak dense operations per second by dtype, bytes per second of memory, bytes of memory."""

    name: str
    peak_flops: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int

    @property
    def half_dtype(self) -> str:
        """The dtype of 16 bits to train in: bfloat16 where the device has it."""
        return "bfloat16" if "bfloat16" in self.peak_flops else "float16"

    def dtype_faults(self, flag: str, dtype: str | None) -> list[str]:
        """That no peak of ``dtype``, given as ``flag``, is known."""
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
    """The preset of a GPU by the name that CUDA gives it; None where its peaks are others.

    The preset's name is a word of it: an RTX A1000 is no A100. Cards for PCIe and parts of a GPU
    (MIG) are slower, and one with another size of memory is another.
    """
    words = re.split(r"[^A-Za-z0-9]+", cuda_name)
    if {"PCIe", "PCIE", "NVL", "MIG"} & {*words}:
        return None
    sizes = {word for word in words if re.fullmatch(r"\d+GB", word)}
    found = [
        device
        for name, device in PRESETS.items()
        if name.split("-")[0] in words and sizes <= {f"{device.memory_bytes // 10**9}GB"}
    ]
    return found[0] if len(found) == 1 else None


FIGURES = " TFLOP/s, "
"""In the names of devices of which only figures are known."""


def peaks_name(tflops: float, bandwidth_gbs: float) -> str:
    """What a device of these figures is called, but for its memory."""
    return f"{tflops:g}{FIGURES}{bandwidth_gbs:g} GB/s"


def custom_device(peak_tflops: float, bandwidth_gbs: float, memory_gb: float) -> Device:
    """A device of these figures; its peak is that of whatever dtype is profiled."""
    name = f"{peaks_name(peak_tflops, bandwidth_gbs)}, {memory_gb:g} GB"
    peak = dict.fromkeys(ELEMENT_BYTES, peak_tflops * 1e12)
    return Device(name, peak, bandwidth_gbs * 1e9, round(memory_gb * 1e9))


@dataclass(frozen=True)
class Roofline:
    """Times on a device that reaches a part of its peaks.

    ``compute_efficiency`` is the part of peak operations that large matrix products and
    convolutions reach in training, ``bandwidth_efficiency`` the part of peak bandwidth, and
    ``launch_s`` is added for every kernel. The defaults are round numbers of the usual size, not
    measurements: ratios between layers are what they are for. Raises ValueError for a dtype whose
    peak is not known.
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
        """The assumptions in words."""
        peak = self.device.peak_flops[self.dtype]
        return (
            f"roofline: {self.compute_efficiency:g} of {peak / 1e12:g} TFLOP/s, "
            f"{self.bandwidth_efficiency:g} of {self.device.bytes_per_s / 1e9:g} GB/s, "
            f"{self.launch_s * 1e6:g} us for each kernel"
        )

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """How long ``kernels`` take one after another."""
        rate = self.compute_efficiency * self.device.peak_flops[self.dtype]
        bandwidth = self.bandwidth_efficiency * self.device.bytes_per_s
        return sum(
            self.launch_s + max(kernel.flops / rate, kernel.num_bytes / bandwidth)
            for kernel in kernels
        )
