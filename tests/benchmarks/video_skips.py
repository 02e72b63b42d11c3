"""Videos' backbones with skips: folded, routed or relayed, beside FSDP2 and no pipeline.

    .venv/bin/python -m tests.benchmarks.video_skips --json video_skips.json

Open-Sora Plan 1.5's SUV at 121 frames of 576 x 1024 pixels and SVD at 14 x 576 x 1024, predicted
from analytic costs on A100s with so much memory as is told; nothing is run. Links are those of
``long_video``, or 10 Gb/s for each device, none of which share a node. All weights are trained with
Adam, in bfloat16, without EMA. A step has a sample for each device; a microbatch is one sample.
``--profiles`` keeps costs. A row has samples/s of

- fold: both ends of skips on one device,
- routed: sequential or interleaved stages, skips go straight to their destination,
- relayed: sequential stages, skips go through every stage between (predicted only: none runs so),
- no pipeline: data, tensor and context parallelism alone,
- FSDP2: over all devices, which may share tokens.

All but FSDP2 take any tensor and context parallelism within a node. A dash: nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.layouts import LAYOUTS, LOOP, ROW, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.profile import Profile
from tests.benchmarks.long_video import LINKS, machine, profile_of, sharded
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.setups import cluster_of, decide

MODELS = ("suv-8.5b", "suv-13b", "svd-14f-576x1024")
SLOW = "10gb"
FOLD = "fold"
WAYS: Mapping[str, Choices] = {
    FOLD: Choices(layouts=tuple(each for each in LAYOUTS.values() if each.kind.name == FOLD)),
    "routed": Choices(layouts=(ROW, LOOP)),
    "relayed": Choices(layouts=(ROW.relayed(),)),
    "no pipeline": Choices(layouts=(WHOLE,)),
}


def place(memory: int, link: str, devices: int) -> Cluster:
    """A100s with so much memory."""
    if link != SLOW:
        return machine(memory, link, devices)
    return cluster_of(devices, 1.25, memory, "A100-80GB")


def row(profile: Profile, where: Cluster, seconds: float) -> dict[str, Any]:
    """Cells of one model on one cluster."""
    evaluator = Evaluator(profile, where, where.num_devices, state=ParameterState())
    found = {way: decide(evaluator, choices, seconds) for way, choices in WAYS.items()}
    ways = {way: None if one is None else one.outcomes[0] for way, one in found.items()}
    rates = {way: best and best.throughput for way, best in ways.items()}
    rates["FSDP2"] = sharded(evaluator, evaluator.costs.context_degrees())
    folded = rates[FOLD]
    fastest = max((rate for way, rate in rates.items() if rate and way != FOLD), default=None)
    return {
        **rates,
        "fold x fastest other": folded / fastest if folded and fastest else None,
        **{f"{way}: pick": best and str(best.config) for way, best in ways.items()},
    }


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    flags.add("--devices", [8, 64], "in all", type=count, nargs="+")
    flags.add("--memory", [80], "GB of a device", type=count, nargs="+")
    links = (*LINKS, SLOW)
    flags.add("--links", list(links), "of devices", nargs="+", choices=links)
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 10.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    for name in args.models:
        profile = profile_of(name, False, args.profiles)
        for devices, memory, link in product(args.devices, args.memory, args.links):
            cells = row(profile, place(memory, link, devices), args.decision_seconds)
            report.add({"model": name, "devices": devices, "GB": memory, "link": link, **cells})


if __name__ == "__main__":
    main()
