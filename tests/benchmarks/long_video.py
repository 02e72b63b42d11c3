"""Long video and large pictures: context parallelism, pipelines, FSDP2, and what fits.

    .venv/bin/python -m tests.benchmarks.long_video --json long_video.json

Predicted from analytic costs of diffusers' classes; nothing is run. Nodes of eight devices: 24 GB
(RTX 4090) and 48 GB (L40S) with PCI Express of 10 GB/s and 100 Gb/s between nodes, 80 GB (A100)
with NVLink. LoRA of rank 16 at the projections of attention, without EMA, or all weights with Adam
in bfloat16. One sample a step for each device. A row has samples/s of

- ours: the tuner's choice of all degrees,
- no CP: the tuner's choice with whole samples,
- no pipeline: the tuner's choice of context and data parallelism alone,
- CP + FSDP2: FSDP2 whose ranks share tokens, which no run here offers; collectives are ideal,
- FSDP2: the same with whole samples.

A dash: nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink, cluster
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.context_rank import of_context_rank
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fsdp.baseline import fsdp_baseline
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import Roofline
from tests.benchmarks.emulation import ATTENTION
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.setups import USABLE, decide


@dataclass(frozen=True)
class Model:
    """A class of diffusers with its sizes, and further projections that LoRA adapts."""

    name: str
    options: Mapping[str, Any]
    targets: tuple[str, ...] = ()


_WAN, _HUNYUAN = "WanTransformer3DModel", "HunyuanVideoTransformer3DModel"
MODELS: Mapping[str, Model] = {
    "wan-14b-81f-480p": Model(_WAN, {"frames": 21, "height": 60, "width": 104}),
    "wan-14b-81f-720p": Model(_WAN, {"frames": 21, "height": 90, "width": 160}),
    "hunyuanvideo-129f-720p": Model(_HUNYUAN, {}),
    "ltx-2b-121f-704p": Model(
        "LTXVideoTransformer3DModel", {"frames": 16, "height": 22, "width": 38}
    ),
    "qwen-image-1024": Model("QwenImageTransformer2DModel", {}),
    "flux2-1024": Model("Flux2Transformer2DModel", {}, ("to_qkv_mlp_proj", "to_out")),
}
_PCIE = ClusterLink("pcie", 10, 20, BandwidthScope.DEVICE)
_NETWORK = ClusterLink("ethernet", 12.5, 30, BandwidthScope.NODE)


def machine(gigabytes: int, devices: int) -> Cluster:
    """Nodes of eight devices with so much memory."""
    nodes = max(1, devices // 8)
    if gigabytes == 80:
        return cluster("dgx-a100", nodes)
    device = {24: "4090-24GB", 48: DeviceFigures(181, 864)}[gigabytes]
    across = _NETWORK if nodes > 1 else None
    return Cluster(
        f"{gigabytes} GB", nodes, 8, gigabytes, device, _PCIE, across, usable_memory=USABLE
    )


@cache
def backbone_of(name: str, adapted: bool) -> Backbone:
    """The model, with all weights trained or an adapter."""
    from model_specs import TrainedPart, load_backbone, trained_as

    model = MODELS[name]
    backbone = load_backbone(f"diffusers:{model.name}", {"dtype": "bfloat16", **model.options})
    if not adapted:
        return backbone
    adapter = Adapter(targets=(*ATTENTION, *model.targets) if model.targets else ATTENTION)
    return trained_as(backbone, TrainedPart(adapter=adapter.to_record()))


@cache
def profile_of(name: str, adapted: bool, gigabytes: int) -> Profile:
    """Analytic costs of one and two samples, with those of context parallelism."""
    from megatron_pulse.profile.analytic import analyse, analyse_context
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    device = machine(gigabytes, 8).peaks
    assert device is not None
    backbone, roofline = backbone_of(name, adapted), Roofline(device, "bfloat16")
    profile = analyse(backbone, (1, 2), roofline, running=RUNNING)
    return analyse_context(profile, backbone, roofline, RUNNING)


def row(name: str, whole: Profile, where: Cluster, seconds: float) -> dict[str, Any]:
    """Cells of one model on one cluster."""
    samples = where.num_devices
    evaluator = Evaluator(whole, where, samples, state=ParameterState())
    sizes = (1, 2)

    def best(**limits: Any) -> Outcome | None:
        found = decide(evaluator, Choices(micro_batch_size=sizes, **limits), seconds)
        return None if found is None else found.outcomes[0]

    ours, alone = best(), best(context=(1,))
    others = {
        "no CP": alone and alone.throughput,
        "no pipeline": (flat := best(pipeline=(1,))) and flat.throughput,
        "CP + FSDP2": max(
            (
                rate
                for size in evaluator.costs.context_degrees()[1:]
                if (rate := sharded(evaluator, size)) is not None
            ),
            default=None,
        ),
        "FSDP2": sharded(evaluator, 1),
    }
    fastest = max((rate for rate in others.values() if rate), default=None)
    return {
        "model": name,
        "devices": where.num_devices,
        "GB": where.memory_gb,
        "ours": ours and ours.throughput,
        **others,
        "x fastest other": ours.throughput / fastest if ours and fastest else None,
        "the pick": "nothing fits" if ours is None else str(ours.config),
        "exchanged, % of the step": ours and 100 * ours.context_s / ours.step_s,
        "GB held": ours and max(ours.memory_bytes) / 1e9,
    }


def sharded(evaluator: Evaluator, size: int) -> float | None:
    """Samples/s of FSDP2 over all devices, ``size`` of which share the tokens of a sample."""
    where = evaluator.cluster
    profile = of_context_rank(evaluator.profile, where, size)
    state = evaluator.state
    found = fsdp_baseline(
        profile,
        where,
        size * evaluator.global_batch_size,  # parts of samples: each device has as many
        evaluator.estimator.adam_s,
        state.ema,
        not state.grad_reduce_in_bf16,
        allowed=(1, 2),
    )
    return None if found is None else found.throughput / size


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    flags.add("--devices", [8], "in all", type=count, nargs="+")
    flags.add("--memory", [24, 48, 80], "GB of a device", type=count, nargs="+")
    flags.add(
        "--trained", ["LoRA", "all"], "LoRA, all, or both", nargs="+", choices=["LoRA", "all"]
    )
    flags.add("--decision-seconds", 10.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    for devices, name, trained, memory in product(
        args.devices, args.models, args.trained, args.memory
    ):
        profile = profile_of(name, trained == "LoRA", memory)
        cells = row(f"{name}, {trained}", profile, machine(memory, devices), args.decision_seconds)
        report.add(cells)


if __name__ == "__main__":
    main()
