"""SVD at 14 x 576 x 1024: folded, sequential with skips routed and relayed, and FSDP2.

    .venv/bin/python -m tests.benchmarks.svd_plans --profiles costs --json svd_plans.json

Predicted from analytic costs on A100s in nodes of eight, all weights with Adam in bfloat16; nothing
is run. A step has a sample for each device, a microbatch one. Cells are samples/s of the tuner's
choice of everything else. *Relayed* skips travel within the boundaries that they cross. Such a plan
is predicted only. A dash: nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.layouts import LAYOUTS, ROW, WHOLE, Layout
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.profile import Profile
from tests.benchmarks.long_video import LINKS, machine, profile_of, sharded
from tests.benchmarks.report import Flags, Report, count
from tests.benchmarks.setups import decide

MODEL = "svd-14f-576x1024"
_FOLDS = tuple(layout for layout in LAYOUTS.values() if layout.kind.name == "fold")
WAYS: Mapping[str, tuple[Layout, ...]] = {
    "fold": _FOLDS, "routed": (ROW,), "relayed": (ROW.relayed(),),
}  # fmt: skip


def row(profile: Profile, where: Cluster, seconds: float) -> dict[str, Any]:
    """Cells of one cluster."""
    evaluator = Evaluator(profile, where, where.num_devices, state=ParameterState())
    degrees = tuple(p for p in (2, 4, 8, 16, 32, 64) if where.num_devices % p == 0)
    found = {}
    for name, layouts in WAYS.items():
        choices = Choices(layouts=layouts, micro_batch_size=(1,), pipeline=degrees)
        best = decide(evaluator, choices, seconds)
        found[name] = None if best is None else best.outcomes[0]
    choices = Choices(layouts=(WHOLE,), micro_batch_size=(1,), pipeline=(1,))
    alone = decide(evaluator, choices, seconds)
    rates = {name: best and best.throughput for name, best in found.items()}
    fold = found["fold"]
    return {
        "devices": where.num_devices,
        "GB": where.memory_gb,
        "link": str(where.intra_node.kind),
        **rates,
        "replicas": alone and alone.outcomes[0].throughput,
        "FSDP2": sharded(evaluator, (1,)),
        "the fold": "nothing fits" if fold is None else str(fold.config),
        "GB held": fold and max(fold.memory_bytes) / 1e9,
    }


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--devices", [8, 16, 32, 64], "in all", type=count, nargs="+")
    flags.add("--memory", [48, 80], "GB of a device", type=count, nargs="+")
    flags.add("--links", list(LINKS), "within a node", nargs="+", choices=LINKS)
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 10.0, "of processor time for each plan")
    args = flags.parse_args()
    report, profile = Report(args.json), profile_of(MODEL, False, args.profiles)
    for link, memory, devices in product(args.links, args.memory, args.devices):
        report.add(row(profile, machine(memory, link, devices), args.decision_seconds))


if __name__ == "__main__":
    main()
