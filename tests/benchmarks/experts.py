"""Wan 2.2 A14B's two experts: in one cascade, one after the other, or side by side.

    .venv/bin/python -m tests.benchmarks.experts --json experts.json

Predicted from analytic costs on A100s with so much memory as is told; nothing is run. Each device
has a link of its own, and one of 25 GB/s to the host. LoRA of rank 16 at the projections of
attention, or all weights with Adam, in bfloat16, without EMA. A step has a sample for each device
and expert, a microbatch one. ``--profiles`` keeps costs, which take minutes. A row has samples/s
of each expert while both are trained:

====================  ==========================================================================
cascade               both in one run, in opposite directions of one pipeline, weights of both
one after the other   each in a run of its own on all devices: half of that run's samples/s
side by side          each in a run of its own on half of the devices
====================  ==========================================================================

All are the tuner's choices, of a cascade's degrees and schedules, or of all ways to train one
expert. Turns of n steps in one run are as fast as one after the other, less ``swap, s`` in every n
steps. A swap copies one expert to the host and the other from it. A dash: nothing fits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.layout.layouts import default_layout
from megatron_pulse.planner.partition.memory import ParameterState, bytes_per_parameter
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from tests.benchmarks.long_video import profile_of
from tests.benchmarks.report import Flags, Report, count, positives, some_of
from tests.benchmarks.setups import cluster_of, decide
from tests.benchmarks.sharded_best import HOST_GBS

MODELS = ("wan-14b-17f-480p", "wan-14b-81f-480p")
_HOST_GBS = max(HOST_GBS)
"""GB/s between a device and the host."""


def two_of(profile: Profile) -> Profile:
    """Costs of a cascade of two such backbones without skips."""
    layers, conditioning = [], []
    for first, chain in ((0, "high"), (len(profile.layers), "low")):
        for i, layer in enumerate(profile.layers):
            begins = {"begins": True, "boundary_bytes": 0} if first and not i else {}
            layers.append(replace(layer, name=f"{chain}.{layer.name}", **begins))
        for each in profile.conditioning:
            consumers = tuple(first + i for i in each.consumers)
            name, source = f"{chain}.{each.name}", first + each.source
            conditioning.append(replace(each, name=name, source=source, consumers=consumers))
    return replace(
        profile,
        layers=tuple(layers),
        times={size: (*times, *times) for size, times in profile.times.items()},
        conditioning=tuple(conditioning),
        context=None,
        sliced={},
        sliced_context={},
    )


def place(devices: int, rate: float, memory: int) -> Cluster:
    """A100s with so much memory."""
    host = ClusterLink("pcie", _HOST_GBS, 10.0, BandwidthScope.DEVICE)
    return cluster_of(devices, rate, memory, "A100-80GB", host=host)


def best(profile: Profile, where: Cluster, choices: Choices, seconds: float) -> Outcome | None:
    """The tuner's choice for one sample on each device."""
    evaluator = Evaluator(profile, where, where.num_devices, state=ParameterState())
    found = decide(evaluator, choices, seconds, fsdp=choices.fsdp)
    return None if found is None else found.outcomes[0]


@cache
def alone(
    model: str, trained: str, folder: Path | None, devices: int, rate: float, memory: int, s: float
) -> Outcome | None:
    """The fastest way to train one expert."""
    profile = profile_of(model, trained == "LoRA", folder)
    return best(profile, place(devices, rate, memory), Choices(micro_batch_size=(1,)), s)


def swap_s(profile: Profile, devices: int) -> float:
    """Seconds in which devices exchange the state of one expert for that of the other.

    Trained parameters go both ways, without gradients. Frozen ones stay on the host as well.
    """
    size = ELEMENT_BYTES[profile.dtype]
    each = 2 * (bytes_per_parameter(profile.dtype) - 4)
    num_bytes = sum(
        each * layer.trained_parameters + size * layer.frozen_parameters for layer in profile.layers
    )
    return num_bytes / devices / _HOST_GBS / 1e9


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS[:1]), "with commas between", type=some_of(MODELS))
    flags.add("--devices", [4, 8], "in all", type=count, nargs="+")
    flags.add("--memory", [24, 48, 80], "GB of a device", type=count, nargs="+")
    flags.add("--rates", [10.0, 2.5], "GB/s, with commas between", type=positives)
    flags.add("--trained", ["LoRA", "all"], "what is trained", nargs="+", choices=["LoRA", "all"])
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 5.0, "of processor time for each plan")
    args = flags.parse_args()
    report = Report(args.json)
    seconds, pair = args.decision_seconds, default_layout(has_skips=False, num_chains=2)
    cells = product(args.models, args.trained, args.devices, args.memory, args.rates)
    for model, trained, devices, memory, rate in cells:
        profile = profile_of(model, trained == "LoRA", args.profiles)
        of = model, trained, args.profiles
        one = alone(*of, devices, rate, memory, seconds)
        half = alone(*of, devices // 2, rate, memory, seconds)
        whole = place(devices, rate, memory)
        choices = Choices((pair,), tensor=(1,), context=(1,), micro_batch_size=(1,), fsdp=False)
        both = best(two_of(profile), whole, choices, seconds)
        rates: dict[str, Any] = {
            "cascade": both and both.throughput,
            "one after the other": one and one.throughput / 2,
            "side by side": half and half.throughput,
        }
        known = {way: found for way, found in rates.items() if found}
        report.add(
            {
                "model": f"{model}, {trained}",
                "devices": devices,
                "GB": memory,
                "GB/s": rate,
                **rates,
                "fastest": max(known, key=lambda way: known[way]) if known else "none fits",
                "swap, s": swap_s(profile, devices),
                "cascade: pick": both and str(both.config),
                "one: pick": one and str(one.config),
                "half: pick": half and str(half.config),
            }
        )


if __name__ == "__main__":
    main()
