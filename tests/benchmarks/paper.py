"""The tuner on the set-ups of the PULSE paper, with analytic costs, beside what it measured.

    .venv/bin/python -m tests.benchmarks.paper [--seconds 6] [--only uvit-2.7b]

Devices are at the paper's figures (presets pulse-v100 and pulse-910a) in float16; inputs are its
latents. It does not give batch sizes: a step has 32 samples a device, of Hunyuan-DiT 8. It gives
no patch size either: with patches of 2 its U-ViT reaches a third of a V100's peak, with patches of
1 it would exceed the peak.

Every way is tuned with its own choices (degrees, microbatch size, recomputation, distributed
optimizer, ranks inside a node): "PULSE" is the exact fold, "1F1B" one stage on each device with
skips relayed through the stages between, "data" one device per replica with the distributed
optimizer. None of these three splits backwards, has tensor parallelism, or takes max_in_flight
memory; the tuner's own choice may have all of it. The paper's data parallelism is ZeRO-2.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_pulse.planner.cluster.cluster import Cluster, cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.partition.volume import relayed
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES, Device, Roofline
from model_specs import load_backbone
from tests.benchmarks.decide import decide

DTYPE = "float16"
APART = 0.3
"""Share by which prediction and measurement may differ without being explained."""

OF_ALL = 4
"""Times as long for the tuner's own choice, of some thousand configs, as for one way."""

PULSE, ONE_F_ONE_B, DATA = "PULSE", "1F1B", "data"

_PLAIN = Choices(tensor=(1,), split=(False,), max_in_flight=(False,))
WAYS: Mapping[str, Choices] = {
    "tuner": Choices(),
    PULSE: replace(_PLAIN, layouts=(FOLD_EXACT,)),
    ONE_F_ONE_B: replace(_PLAIN, layouts=(ROW,)),
    DATA: replace(_PLAIN, layouts=(WHOLE,), pipeline=(1,), distributed_optimizer=(True,)),
}


@dataclass(frozen=True)
class Setup:
    """A model on a cluster, and the paper's samples per second by way (section VII)."""

    title: str
    backbone: str
    options: Mapping[str, object]
    cluster: str
    samples_per_device: int
    measured: Mapping[str, float]


_UVIT = {"in_channels": 3}
_HUNYUAN = {"sample_size": 64}
_SD_1_7B = {
    "block_out_channels": [448, 960, 1792, 1792],
    "num_heads": [7, 15, 28, 28],
}
SETUPS = (
    Setup("SD v2 1.7B", "sd-v2-2.5b", _SD_1_7B, "pulse-v100:1", 32, {PULSE: 257.0}),
    Setup("U-ViT 1B", "uvit-1.4b", {**_UVIT, "depth": 32}, "pulse-v100:1", 32, {PULSE: 134.7}),
    Setup(
        "U-ViT 2.7B",
        "uvit-2.7b",
        _UVIT,
        "pulse-v100",
        32,
        {PULSE: 141.5, ONE_F_ONE_B: 79.7, DATA: 128.1},
    ),
    Setup(
        "SD v2 4.6B",
        "sd-v2-4.6b",
        {},
        "pulse-v100",
        32,
        {PULSE: 274.6, ONE_F_ONE_B: 114.8, DATA: 245.5},
    ),
    Setup(
        "Hunyuan-DiT 3B",
        "hunyuan-dit-3b",
        _HUNYUAN,
        "pulse-v100",
        8,
        {PULSE: 13.8, ONE_F_ONE_B: 8.6, DATA: 11.9},
    ),
    Setup(
        "U-ViT 2.7B",
        "uvit-2.7b",
        _UVIT,
        "pulse-910a",
        32,
        {PULSE: 237.8, ONE_F_ONE_B: 82.7, DATA: 103.0},
    ),
    Setup(
        "SD v2 4.6B",
        "sd-v2-4.6b",
        {},
        "pulse-910a",
        32,
        {PULSE: 159.1, ONE_F_ONE_B: 55.4, DATA: 141.5},
    ),
    Setup(
        "Hunyuan-DiT 3B",
        "hunyuan-dit-3b",
        _HUNYUAN,
        "pulse-910a",
        8,
        {PULSE: 5.4, ONE_F_ONE_B: 4.0, DATA: 3.5},
    ),
)


def flops_per_sample(profile: Profile) -> float:
    """Operations of a forward and backward of one sample: seconds on a device of 1 FLOP/s."""
    costs = profile.at(1)
    return sum(costs.forward_s) + sum(costs.backward_s)


def tuned(way: str, profile: Profile, where: Cluster, batch: int, seconds: float) -> Tuning | None:
    """The best of a way; None where nothing fits.

    In 1F1B skips are relayed by every stage between their ends, as in Megatron's pipeline.
    """
    divides = profile.backbone["family"] != "unet"
    transform = relayed if way == ONE_F_ONE_B else None
    evaluator = Evaluator(profile, where, batch, divides, transform=transform)
    return decide(evaluator, WAYS[way], seconds)


def explanation(setup: Setup, way: str, best: Outcome, flops: float, where: Cluster) -> str:
    """Why prediction and measurement differ, in figures."""
    assert where.peaks is not None
    peak = where.num_devices * where.peaks.peak_flops[DTYPE]
    paper = setup.measured[way] * flops / peak
    ours = best.throughput * flops / peak
    computing = best.pipeline_s * (1 - best.bubble)
    lost = best.step_s - computing
    step = best.global_batch_size / setup.measured[way]
    if paper < ours:
        left = step - lost
        rate = ours * best.step_s / left if left > 0 else 0.0
        enough = "alone explains it" if best.step_s + lost >= step else "does not explain it"
        reason = (
            f"the paper's step is {step / best.step_s:.1f} times as long. Of ours "
            f"{lost / best.step_s:.0%} are waiting, reduction and optimizer: twice as much "
            f"{enough}; kernels at {rate:.1%} of the peak instead of "
            f"{ours * best.step_s / computing:.1%} do"
        )
    else:
        reason = (
            f"the paper's step is {best.step_s / step:.1f} times as short; "
            f"{lost / best.step_s:.0%} of ours are waiting, reduction and optimizer"
        )
    return (
        f"{setup.title} on {setup.cluster}, {way}: {best.throughput:.4g} predicted, "
        f"{setup.measured[way]:.4g} measured, which is {paper:.1%} of the devices' peak "
        f"(predicted: {ours:.1%}); {reason}."
    )


def main() -> None:
    """Print the table and what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each way (default 6)")
    parser.add_argument("--only", default="", help="backbones whose name has this in it")
    args = parser.parse_args()
    unit = Device("1 FLOP/s", dict.fromkeys(ELEMENT_BYTES, 1.0), 1e30, 1)
    print("| model | devices | way | config | samples/s | paper | ratio | bubble | GB | gap |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    notes, orders = [], []
    for setup in SETUPS:
        if args.only not in setup.backbone:
            continue
        where = cluster(setup.cluster)
        assert where.peaks is not None
        backbone = load_backbone(setup.backbone, dict(setup.options))
        profile = analyse(backbone, [1, 8], Roofline(where.peaks, DTYPE))
        flops = flops_per_sample(analyse(backbone, [1], Roofline(unit, DTYPE, 1.0, 1.0, 0.0)))
        size = sum(layer.parameters for layer in profile.layers)
        batch = setup.samples_per_device * where.num_devices
        reached = {}
        for way in WAYS:
            more = OF_ALL if way == "tuner" else 1
            found = tuned(way, profile, where, batch, more * args.seconds)
            named = f"| {setup.title} ({size / 1e9:.2f}e9) | {where.num_devices} {where.name} "
            if found is None:
                print(f"{named}| {way} | nothing fits | | | | | | |", flush=True)
                continue
            best = found.outcomes[0]
            reached[way] = best.throughput
            paper = setup.measured.get(way)
            beside = f"{paper:.4g} | {best.throughput / paper:.2f}" if paper else "|"
            gap = 0.0 if found.proved else 1 - found.bound_s / best.step_s
            print(
                f"{named}| {way} | {best.config} | {best.throughput:.4g} | {beside} | "
                f"{best.bubble:.1%} | {max(best.memory_bytes) / 1e9:.1f} | {gap:.1%} |",
                flush=True,
            )
            if paper and abs(best.throughput / paper - 1) > APART:
                notes.append(explanation(setup, way, best, flops, where))
        both = [way for way in setup.measured if way in reached]
        ours = sorted(both, key=lambda way: -reached[way])
        theirs = sorted(both, key=lambda way: -setup.measured[way])
        same = "the same order" if ours == theirs else f"the paper: {' > '.join(theirs)}"
        if len(both) > 1:
            orders.append(f"{setup.title} on {setup.cluster}: {' > '.join(ours)}; {same}")
    print("\nRank order, predicted:\n")
    print("\n".join(f"- {line}" for line in orders))
    print(f"\nPredictions more than {APART:.0%} from the paper:\n")
    print("\n".join(f"- {line}" for line in notes) or "- none")


if __name__ == "__main__":
    main()
