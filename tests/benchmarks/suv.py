"""SUV with its skips folded, routed or relayed, beside FSDP2 and no pipeline.

    .venv/bin/python -m tests.benchmarks.suv --json suv.json

Open-Sora Plan 1.5 at 121 frames of 576 x 1024 pixels, predicted from analytic costs on A100s, with
so much memory as is told; nothing is run. Links are those of ``long_video``, or 10 Gb/s for each
device, none of which share a node. All weights are trained with Adam, in bfloat16, without EMA. A
step has a sample for each device, as the authors' last stages have; a microbatch is one sample.
``--profiles`` keeps costs. A row has samples/s of

- fold: both ends of every skip on one device,
- routed: sequential or interleaved stages, skips go straight to their destination,
- relayed: sequential stages, skips go through every stage between,
- no pipeline: data, tensor and context parallelism alone,
- FSDP2: over all devices, which may share tokens; collectives are ideal.

All but FSDP2 take any tensor and context parallelism within a node. A dash: nothing fits.
Relayed skips do not run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LOOP, ROW, TWO_WAVES, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.partition.volume import relayed
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.profile import Profile
from tests.benchmarks.long_video import LINKS, machine, sharded
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.setups import A100, cluster_of, decide

MODELS = ("suv-8.5b", "suv-13b")
SLOW = "10gb"
FOLD, RELAYED = "fold", "relayed"
WAYS: Mapping[str, Choices] = {
    FOLD: Choices(layouts=(FOLD_EXACT, TWO_WAVES)),
    "routed": Choices(layouts=(ROW, LOOP)),
    RELAYED: Choices(layouts=(ROW,)),
    "no pipeline": Choices(layouts=(WHOLE,)),
}


def place(memory: int, link: str, devices: int) -> Cluster:
    """A100s with so much memory."""
    if link != SLOW:
        return machine(memory, link, devices)
    return cluster_of(devices, 1.25, memory, "A100-80GB")


def profile_of(name: str, folder: Path | None) -> Profile:
    """Analytic costs of one sample, with those of context parallelism; kept in ``folder``."""
    from megatron_pulse.profile.analytic import analyse, analyse_context
    from megatron_pulse.runtime.measure.execution_modes import RUNNING
    from model_specs import load_backbone

    file = None if folder is None else folder / f"{name}.json"
    if file is not None and file.exists():
        return load_profile(file)
    backbone = load_backbone(name)
    profile = analyse(backbone, (1,), A100, running=RUNNING)
    profile = analyse_context(profile, backbone, A100, RUNNING)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, file)
    return profile


def row(name: str, profile: Profile, where: Cluster, seconds: float) -> dict[str, Any]:
    """Cells of one model on one cluster."""

    def best(choices: Choices, **more: Any) -> Outcome | None:
        evaluator = Evaluator(profile, where, where.num_devices, state=ParameterState(), **more)
        found = decide(evaluator, choices, seconds)
        return None if found is None else found.outcomes[0]

    ways = {
        way: best(choices, transform=relayed if way == RELAYED else None)
        for way, choices in WAYS.items()
    }
    rates = {way: found and found.throughput for way, found in ways.items()}
    evaluator = Evaluator(profile, where, where.num_devices, state=ParameterState())
    rates["FSDP2"] = sharded(evaluator, evaluator.costs.context_degrees())
    folded = ways[FOLD]
    fastest = max((rate for way, rate in rates.items() if rate and way != FOLD), default=None)
    return {
        "model": name,
        "devices": where.num_devices,
        "GB": where.memory_gb,
        "link": where.name,
        **rates,
        "fold x fastest other": folded.throughput / fastest if folded and fastest else None,
        **{f"{way}: pick": found and str(found.config) for way, found in ways.items()},
    }


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    flags.add("--devices", [8, 16, 32, 64], "in all", type=count, nargs="+")
    flags.add("--memory", [80], "GB of a device", type=count, nargs="+")
    links = (*LINKS, SLOW)
    flags.add("--links", list(links), "of devices", nargs="+", choices=links)
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 10.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    for name in args.models:
        profile = profile_of(name, args.profiles)
        for devices, memory, link in product(args.devices, args.memory, args.links):
            cells = row(name, profile, place(memory, link, devices), args.decision_seconds)
            report.add({**cells, "link": link})


if __name__ == "__main__":
    main()
