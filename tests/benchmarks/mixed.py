"""Two unlike cards in one box, of 24 and 16 GB: LoRA of Flux and of Wan 14B.

    .venv/bin/python -m tests.benchmarks.mixed --json mixed.json

Predicted, on an analytic RTX 4090 and RTX 4080; nothing is run. LoRA of rank 16 at the projections
of attention; the base is frozen, in bfloat16 or in NF4. A row has samples/s of

- ours: the plan for the two cards as they are,
- two small: the plan for two of the smaller card, as predicted for these, and as the box runs it,
- by parameters: two stages of equally many parameters, with the best microbatch, schedule and
  activation policy,
- the large alone: the larger card without the other.

A dash: nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind
from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.estimate import even_cuts
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import Roofline
from megatron_pulse.profile.unlike_devices import combine
from tests.benchmarks.emulation import NF4, quantized, real_backbone
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.setups import USABLE, decide

MODELS = {
    "Flux": "flux-lora",
    "Wan 14B, 1 frame": "wan-1-lora",
    "Wan 14B, 17 frames": "wan-17-lora",
}

LARGE = DeviceKind("large", 24, USABLE, "4090-24GB")
SMALL = DeviceKind("small", 16, USABLE, DeviceFigures(97.5, 717))
"""RTX 4080: NVIDIA's Ada white paper, bfloat16 with fp32 accumulation."""

LINK = ClusterLink("pcie", 10, 20, BandwidthScope.DEVICE)
SIZES = (1, 2, 4)
"""Samples of a microbatch."""


def box(*kinds: DeviceKind) -> Cluster:
    """One node with these cards."""
    host = ClusterLink("pcie", 26, 10, BandwidthScope.NODE)
    first = kinds[0]
    alike = Cluster("box", 1, len(kinds), first.memory_gb, first.device, LINK, host=host)
    return replace(alike, usable_memory=first.usable_memory).of_kinds(kinds)


def profiles(name: str) -> Iterator[tuple[str, dict[str, Profile]]]:
    """Profiles on both cards, with the base in bfloat16 and in NF4."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    whole, packed = dict[str, Profile](), dict[str, Profile]()
    for kind in (LARGE, SMALL):
        assert kind.peaks is not None
        roofline = Roofline(kind.peaks, "bfloat16")
        whole[kind.name] = analyse(real_backbone(name), SIZES, roofline, running=RUNNING)
        packed[kind.name] = quantized(whole[kind.name], roofline)
    yield "", whole
    yield NF4, packed


def by_parameters(evaluator: Evaluator) -> float | None:
    """Samples/s of two stages of equally many parameters, at their best."""
    cuts = even_cuts([layer.parameters for layer in evaluator.profile.layers], 2)
    choices = Choices(
        layouts=(LAYOUTS["sequential"],), pipeline=(2,), tensor=(1,), micro_batch_size=SIZES
    )
    return _best(evaluator, evaluator.candidates(choices), cuts)


def as_planned(evaluator: Evaluator, found: Outcome) -> float | None:
    """Samples/s of another cluster's plan on this one, in any order of its devices."""
    configs = list(evaluator.costs.orders(found.config))
    return _best(evaluator, configs, found.stages.partition.cuts)


def _best(evaluator: Evaluator, configs: list[Config], cuts: tuple[int, ...]) -> float | None:
    rates = []
    for config in configs:
        stages = evaluator.cut(config, Partition(config.placement, cuts))
        with suppress(UnfitError):
            evaluator.refuse(config)
            outcome = evaluator.evaluate(config, stages=stages)
            rates += [outcome.throughput] * evaluator.has_room(outcome)
    return max(rates, default=None)


def row(name: str, own: dict[str, Profile], samples: int, seconds: float) -> dict[str, Any]:
    """Cells of one model and batch."""
    mixed = Evaluator(combine(own), box(LARGE, SMALL), samples)
    small = Evaluator(own["small"], box(SMALL, SMALL), samples)
    alone = Evaluator(own["large"], box(LARGE), samples)
    choices = Choices(micro_batch_size=SIZES, recompute=(Recompute.NEVER, Recompute.NEEDED))
    ours, alike, single = (
        None if (found := decide(each, choices, seconds)) is None else found.outcomes[0]
        for each in (mixed, small, alone)
    )
    others = {
        "two small": alike and alike.throughput,
        "its plan here": alike and as_planned(mixed, alike),
        "by parameters": by_parameters(mixed),
        "large alone": single and single.throughput,
    }
    fastest = max((rate for rate in list(others.values())[1:] if rate), default=None)
    return {
        "model": name,
        "samples": samples,
        "ours": ours and ours.throughput,
        **others,
        "x fastest other": ours.throughput / fastest if ours and fastest else None,
        "the pick": "nothing fits" if ours is None else str(ours.config),
        "layers on each": ours and layers(ours),
        "GB": ours and ", ".join(f"{n / 1e9:.1f}" for n in ours.memory_bytes),
    }


def layers(outcome: Outcome) -> str:
    """Number of layers on each pipeline device."""
    partition = outcome.stages.partition
    homes = [partition.device_of_layer(i) for i in range(partition.cuts[-1])]
    return ", ".join(str(homes.count(device)) for device in range(outcome.config.pipeline))


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), "with commas between", type=some_of(MODELS))
    flags.add("--batches", [16], "samples of a step", type=count, nargs="+")
    flags.add("--decision-seconds", 28.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    for name in args.models:
        for (kind, own), samples in product(profiles(MODELS[name]), args.batches):
            report.add(row(f"{name}{kind}", own, samples, args.decision_seconds))


if __name__ == "__main__":
    main()
