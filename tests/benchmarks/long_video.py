"""Long video and large pictures: context parallelism, pipelines, FSDP2, and what fits.

    .venv/bin/python -m tests.benchmarks.long_video --json long_video.json

Predicted from analytic costs of diffusers' classes on A100s, with so much memory as is told;
nothing is run. Nodes of eight devices: NVLink (300 GB/s, and 25 GB/s a device between nodes) or PCI
Express (10 GB/s, and 100 Gb/s a node). LoRA of rank 16 at the projections of attention, or all
weights with Adam, in bfloat16, without EMA. A step has a sample for each device, a microbatch one.
``--profiles`` keeps costs: they take minutes for each model. A row has samples/s of

- ours: the tuner's choice of all degrees, FSDP2 among them,
- no CP: the tuner's choice with whole samples, without FSDP2,
- no pipeline: the tuner's choice of context and data parallelism alone,
- CP + FSDP2: FSDP2 whose ranks share tokens; collectives are ideal,
- FSDP2: the same with whole samples.

A dash: nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink, cluster
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import PRESETS, Roofline
from tests.benchmarks.emulation import ATTENTION
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.setups import decide


@dataclass(frozen=True)
class Model:
    """A backbone with its sizes, and further projections that LoRA adapts."""

    name: str
    options: Mapping[str, Any]
    targets: tuple[str, ...] = ()


_WAN, _HUNYUAN, _LTX = (
    f"diffusers:{name}"
    for name in (
        "WanTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "LTXVideoTransformer3DModel",
    )
)
MODELS: Mapping[str, Model] = {
    "wan-14b-17f-480p": Model(_WAN, {"frames": 5, "height": 60, "width": 104}),
    "wan-14b-81f-480p": Model(_WAN, {"frames": 21, "height": 60, "width": 104}),
    "wan-14b-81f-720p": Model(_WAN, {"frames": 21, "height": 90, "width": 160}),
    "wan-2.2-5b-121f-704p": Model(
        _WAN,
        {
            **{"frames": 31, "height": 44, "width": 80, "num_layers": 30, "ffn_dim": 14336},
            **{"num_attention_heads": 24, "in_channels": 48, "out_channels": 48},
        },
    ),
    "svd-14f-576x1024": Model(
        "diffusers:UNetSpatioTemporalConditionModel",
        {"num_frames": 14, "height": 72, "width": 128, "num_attention_heads": "5,10,20,20"},
    ),
    "hunyuanvideo-129f-720p": Model(_HUNYUAN, {}),
    "suv-8.5b": Model("suv-8.5b", {}),
    "suv-13b": Model("suv-13b", {}),
    "ltx-2b-121f-704p": Model(_LTX, {"frames": 16, "height": 22, "width": 38}),
    "ltx-13b-121f-704p": Model(
        _LTX,
        {
            **{"frames": 16, "height": 22, "width": 38, "num_layers": 48},
            **{"attention_head_dim": 128, "cross_attention_dim": 4096},
        },
    ),
    "qwen-image-1024": Model("diffusers:QwenImageTransformer2DModel", {}),
    "flux2-1024": Model("diffusers:Flux2Transformer2DModel", {}, ("to_qkv_mlp_proj", "to_out")),
}
_PCIE = ClusterLink("pcie", 10, 20, BandwidthScope.DEVICE)
_NETWORK = ClusterLink("ethernet", 12.5, 30, BandwidthScope.NODE)
LINKS = ("nvlink", "pcie")


def machine(gigabytes: int, link: str, devices: int) -> Cluster:
    """Nodes of eight A100s with so much memory."""
    where = replace(cluster("dgx-a100", max(1, devices // 8)), memory_gb=gigabytes)
    if devices < 8:
        where = where.part(devices) or where
    if link == "nvlink":
        return where
    across = None if where.nodes == 1 else _NETWORK
    return replace(where, name="pcie", intra_node=_PCIE, inter_node=across)


def backbone_of(name: str, adapted: bool) -> Backbone:
    """The model, with all weights trained or an adapter."""
    from model_specs import TrainedPart, load_backbone, trained_as

    model = MODELS[name]
    dtype = {"dtype": "bfloat16"} if model.name.startswith("diffusers:") else {}
    backbone = load_backbone(model.name, {**dtype, **model.options})
    if not adapted:
        return backbone
    adapter = Adapter(targets=(*ATTENTION, *model.targets) if model.targets else ATTENTION)
    return trained_as(backbone, TrainedPart(adapter=adapter.to_record()))


def profile_of(name: str, adapted: bool, folder: Path | None) -> Profile:
    """Analytic costs of one sample, with those of context parallelism; kept in ``folder``."""
    from megatron_pulse.profile.analytic import analyse, analyse_context
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    file = None if folder is None else folder / f"{name}{'-lora' * adapted}.json"
    if file is not None and file.exists():
        return load_profile(file)
    backbone, roofline = backbone_of(name, adapted), Roofline(PRESETS["A100-80GB"], "bfloat16")
    profile = analyse(backbone, (1,), roofline, running=RUNNING)
    with suppress(Faults):  # tokens of UNets cannot be divided
        profile = analyse_context(profile, backbone, roofline, RUNNING)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, file)
    return profile


def row(name: str, whole: Profile, where: Cluster, seconds: float) -> dict[str, Any]:
    """Cells of one model on one cluster."""
    samples = where.num_devices
    evaluator = Evaluator(whole, where, samples, state=ParameterState())
    sizes = (1,)

    def best(fsdp: bool = False, **limits: Any) -> Outcome | None:
        choices = Choices(micro_batch_size=sizes, **limits)
        found = decide(evaluator, choices, seconds, fsdp=fsdp)
        return None if found is None else found.outcomes[0]

    ours, alone = best(fsdp=True), best(context=(1,))
    others = {
        "no CP": alone and alone.throughput,
        "no pipeline": (flat := best(pipeline=(1,))) and flat.throughput,
        "CP + FSDP2": sharded(evaluator, evaluator.costs.context_degrees()[1:]),
        "FSDP2": sharded(evaluator, (1,)),
    }
    fastest = max((rate for rate in others.values() if rate), default=None)
    return {
        "model": name,
        "devices": where.num_devices,
        "GB": where.memory_gb,
        "link": str(where.intra_node.kind),
        "ours": ours and ours.throughput,
        **others,
        "x fastest other": ours.throughput / fastest if ours and fastest else None,
        "the pick": "nothing fits" if ours is None else str(ours.config),
        "exchanged, % of the step": ours and 100 * ours.context_s / ours.step_s,
        "GB held": ours and max(ours.memory_bytes) / 1e9,
    }


def sharded(evaluator: Evaluator, context: Sequence[int]) -> float | None:
    """Samples/s of FSDP2 over all devices, of which as many share tokens as one of ``context``."""
    found = evaluator.fsdp_baseline((1,), context)
    return None if found is None else found.throughput


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    flags.add("--devices", [8], "in all", type=count, nargs="+")
    flags.add("--memory", [24, 48, 80], "GB of a device", type=count, nargs="+")
    flags.add("--links", list(LINKS), "within a node", nargs="+", choices=LINKS)
    flags.add("--trained", ["LoRA", "all"], "what is trained", nargs="+", choices=["LoRA", "all"])
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 10.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    for name, trained in product(args.models, args.trained):
        profile = profile_of(name, trained == "LoRA", args.profiles)
        for devices, memory, link in product(args.devices, args.memory, args.links):
            where = machine(memory, link, devices)
            report.add(row(f"{name}, {trained}", profile, where, args.decision_seconds))


if __name__ == "__main__":
    main()
