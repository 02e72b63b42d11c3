"""A real backbone's chain on a slow scale: times longer, tensors and bandwidths smaller.

A step of the real backbone on V100s has T seconds of computing and B bytes over links of W bytes a
second. Here every operation sleeps ``time_scale`` times its profiled time, every tensor has
1 / ``byte_divisor`` of its bytes, and links have ``W / (byte_divisor * time_scale)``: B / W has
become ``time_scale`` times as long, as T has, so the ratio of computing to communication is real.

Microbatches are as large as the paper's: its ZeRO-2 moves gradients and parameters once a step, so
its bytes per sample (see ``BACKBONES``) say how many samples each device had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from megatron_pulse.adapters.adapter import ATTENTION, Adapter
from megatron_pulse.adapters.quantization import BLOCK
from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.partition.memory import bytes_per_parameter
from megatron_pulse.planner.tune.memory.workspace import Workspace
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES, Kernel, Roofline
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from tests.benchmarks.setups import RTX_4090, V100

FULL_RATE_BYTES_PER_S = 20e6
"""What 10 GB/s become: little enough for two cores to serve several ranks."""

MODEL_S = 0.6
"""What the forward and the backward of the whole backbone on one microbatch become."""

OPERATION_S = 5e-4
"""What an operation of ours takes here beside what it sleeps: the median of 230 rows of the claim,
whose steps took that much longer than predicted for each."""

PAPER_LINK_BYTES_PER_S = 10e9
"""Between the V100 nodes of the paper."""


@dataclass(frozen=True)
class Setup:
    """Training of a backbone: options, samples in a microbatch, microbatches over P, devices.

    ``adapter_of`` is the backbone on which an adapter alone is trained: LoRA of rank 16 at the
    projections of attention and those of ``targets``. ``quantized``: its frozen weights are NF4.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 16
    microbatches_per_device: int = 2
    adapter_of: str = ""
    targets: tuple[str, ...] = ()
    device: Roofline = V100
    quantized: bool = False


BACKBONES: Mapping[str, Setup] = {
    "sd-v2-4.6b": Setup({}, 16, 4),  # ZeRO-2 276 MB a sample: 62 samples a device
    "uvit-2.7b": Setup({}, 16),  # 318 MB: 32
    "hunyuan-dit-3b": Setup({"sample_size": 64}, micro_batch_size=2),  # 2981 MB: 4
    "sdxl": Setup({"sample_size": 128}, micro_batch_size=1),
    "dit-xl-2": Setup(micro_batch_size=16),
}
"""The paper's three, SDXL, and one without skips. Others are taken as they are."""


def _adapter(of: str, targets: tuple[str, ...] = (), **options: Any) -> Setup:
    options = {"dtype": RTX_4090.dtype, **options} if of.startswith("diffusers:") else options
    return Setup(options, 1, 2, of, targets, RTX_4090)


_WAN = "diffusers:WanTransformer3DModel"
ADAPTERS: Mapping[str, Setup] = {
    "sdxl-lora": _adapter("sdxl", sample_size=128),
    "flux-lora": _adapter("flux-dev"),
    "qwen-image-lora": _adapter("diffusers:QwenImageTransformer2DModel"),
    "flux2-lora": _adapter("diffusers:Flux2Transformer2DModel", ("to_qkv_mlp_proj", "to_out")),
    "wan-1-lora": _adapter(_WAN, frames=1),
    "wan-17-lora": _adapter(_WAN, frames=5),
    "wan-81-lora": _adapter(_WAN, frames=21),
}
"""Models whose adapter is trained; Wan 14B on 1, 17 and 81 frames of 480 x 832."""

NF4 = ", NF4"
"""End of the name of a model whose frozen weights are quantised."""

NF4_BYTES = 0.5 + 4 / BLOCK
"""Bytes of a weight, with its share of a block's fp32 scale."""


@dataclass(frozen=True)
class Emulation:
    """A backbone with small tensors and long times; ``costs`` are of its real microbatch."""

    name: str
    profile: Profile
    costs: ChainCosts
    backbone: Backbone
    micro_batch_size: int
    time_scale: float
    byte_divisor: float
    activations: ActivationPolicies = ActivationPolicies()

    @cached_property
    def workspace(self) -> Workspace:
        """Working memory of operations, in real bytes beside what is held."""
        times = self.profile.times[self.micro_batch_size]
        return Workspace(times, (1,) * len(times), self.costs, self.activations)

    @property
    def slow(self) -> ChainCosts:
        """The costs that ranks show: seconds and bytes as emulated."""
        c, layers = self.costs, self.backbone.layers
        times: dict[str, Any] = {
            field.name: tuple(self.time_scale * t for t in getattr(c, field.name))
            for field in fields(c)
            if field.name.endswith("_s")
        }
        return replace(
            c,
            **times,
            boundary_bytes=tuple(
                0 if i in c.starts[1:] else sum(map(num_bytes, layer.inputs))
                for i, layer in enumerate(layers)
            ),
            skips=tuple(
                SkipCost(s.source, s.destination, num_bytes(s.spec)) for s in self.backbone.skips
            ),
        )

    def variant(
        self,
        micro_batch_size: int,
        activations: ActivationPolicies,
    ) -> Emulation:
        """The same with microbatches of another size and other activation policies."""
        costs = self.profile.at(micro_batch_size, activations)
        small = shrink(real_backbone(self.name), micro_batch_size, self.byte_divisor)
        return replace(
            self,
            costs=costs,
            backbone=small,
            micro_batch_size=micro_batch_size,
            activations=activations,
        )

    def layer_state(self, data_parallel: int = 1) -> list[float]:
        """Real bytes of each layer's parameters, gradients and optimizer on a device."""
        dtype, costs = self.profile.dtype, self.costs
        trained = bytes_per_parameter(dtype, data_parallel > 1, data_parallel)
        return [
            trained * count + ELEMENT_BYTES[dtype] * (total - count)
            for total, count in zip(costs.stored_parameters, costs.trained_parameters, strict=True)
        ]

    def link(self, bytes_per_s: float) -> Link:
        """The emulated link in the place of a real one; its latency is gloo's, about."""
        return Link(5e-4, bytes_per_s / (self.byte_divisor * self.time_scale))

    def rate_mbit(self, bytes_per_s: float) -> float:
        """What a link is limited to: the payload's rate, and what headers add to it."""
        return 8e-6 * self.link(bytes_per_s).bytes_per_s / PAYLOAD_SHARE


PAYLOAD_SHARE = 0.99
"""Of what is sent in frames of 9000 bytes, the rest are headers."""


def num_bytes(spec: TensorSpec) -> int:
    """Emulated tensors are fp32 and of one 'sample'."""
    return 4 * spec.numel_per_sample


def setup_of(name: str) -> Setup:
    """How ``name`` is trained here."""
    if name.endswith(NF4):
        return replace(setup_of(name.removesuffix(NF4)), quantized=True)
    return BACKBONES.get(name) or ADAPTERS.get(name) or Setup()


@cache
def real_profile(name: str, sizes: tuple[int, ...] = ()) -> Profile:
    """The analytic profile of ``name`` on its devices in half precision, at the usual microbatch or
    at these."""
    from megatron_pulse.profile.analytic import analyse

    setup = setup_of(name)
    if setup.quantized:
        return quantized(real_profile(name.removesuffix(NF4), sizes), setup.device)
    sizes = sizes or (setup.micro_batch_size,)
    return analyse(real_backbone(name), sizes, setup.device, running=RUNNING)


def quantized(profile: Profile, device: Roofline) -> Profile:
    """``profile`` with frozen weights in NF4, dequantised in each forward and each backward."""
    size = ELEMENT_BYTES[profile.dtype]
    layers = [
        replace(
            layer,
            quantized_parameters=layer.frozen_parameters,
            quantized_bytes=round(NF4_BYTES * layer.frozen_parameters),
        )
        for layer in profile.layers
    ]
    apart_s = [
        device.seconds([Kernel(0, round((NF4_BYTES + size) * layer.frozen_parameters))])
        for layer in profile.layers
    ]
    names = ("forward_s", "input_grad_s", "split_forward_s", "split_input_grad_s")

    def longer(row: LayerTimes, seconds: float) -> LayerTimes:
        given = {name: getattr(row, name) for name in names}
        return replace(row, **{name: had + seconds for name, had in given.items() if had})

    times = {number: tuple(map(longer, rows, apart_s)) for number, rows in profile.times.items()}
    return replace(profile, layers=tuple(layers), times=times)


def more_sizes(name: str) -> tuple[int, ...]:
    """Samples of a microbatch from a quarter of the usual to four times as many."""
    usual = setup_of(name).micro_batch_size
    return tuple(size for size in (2**k for k in range(20)) if usual <= 4 * size <= 16 * usual)


@cache
def real_backbone(name: str) -> Backbone:
    """``name`` as it is trained here."""
    from model_specs import TrainedPart, load_backbone, trained_as

    setup = setup_of(name)
    backbone = load_backbone(setup.adapter_of or name, setup.options)
    if not setup.adapter_of:
        return backbone
    adapter = Adapter(targets=(*ATTENTION, *setup.targets) if setup.targets else ATTENTION)
    return trained_as(backbone, TrainedPart(adapter=adapter.to_record()))


def emulate(name: str, model_s: float = MODEL_S, sizes: tuple[int, ...] = ()) -> Emulation:
    """``name``, whose whole model takes ``model_s`` for a usual microbatch; its profile is of
    ``sizes`` too."""
    size = setup_of(name).micro_batch_size
    profile = real_profile(name, tuple(sorted({size, *sizes})) if sizes else ())
    return slowed(name, real_backbone(name), profile, size, model_s)


def slowed(
    name: str, backbone: Backbone, profile: Profile, size: int, model_s: float = MODEL_S
) -> Emulation:
    """``backbone``, whose whole model takes ``model_s`` for a microbatch of ``size``."""
    costs = profile.at(size)
    time_scale = model_s / (sum(costs.forward_s) + sum(costs.backward_s))
    divisor = PAPER_LINK_BYTES_PER_S / (time_scale * FULL_RATE_BYTES_PER_S)
    small = shrink(backbone, size, divisor)
    return Emulation(name, profile, costs, small, size, time_scale, divisor)


def shrink(backbone: Backbone, micro_batch_size: int, divisor: float) -> Backbone:
    """The same chain and skips with flat fp32 tensors of the right share of the fp16 bytes.

    Conditioning is left out: embedders run on every device, for all contestants.
    """

    def small(spec: TensorSpec) -> TensorSpec:
        real = 2 * micro_batch_size * spec.numel_per_sample
        return TensorSpec((max(1, element_count(real, divisor)),))

    def layer(real: Layer) -> Layer:
        return Layer(
            real.name,
            _no_module,
            tuple(map(small, real.inputs)),
            tuple(map(small, real.outputs)),
            dict(real.pushes),
            {name: small(spec) for name, spec in real.pops.items()},
            chain=real.chain,
        )

    layers = tuple(map(layer, backbone.layers))
    return Backbone(backbone.name, layers, {}, backbone.record, parts=backbone.parts)


def element_count(real_bytes: float, divisor: float) -> int:
    """Emulated fp32 elements of so many real bytes."""
    return round(real_bytes / divisor / 4)


def relaying(backbone: Backbone, relayed: ChainCosts) -> Backbone:
    """The chain whose skips travel in the boundaries, whose bytes ``relayed`` has."""
    sizes = [TensorSpec((max(1, size // 4),)) for size in relayed.boundary_bytes]
    ends = [*sizes[1:], backbone.output_spec]
    layers = tuple(
        Layer(layer.name, _no_module, (taken,), (left,))
        for layer, taken, left in zip(backbone.layers, sizes, ends, strict=True)
    )
    return Backbone(backbone.name, layers, {}, backbone.record)


def _no_module(context: Any) -> Any:
    raise RuntimeError("an emulated layer has no module")
