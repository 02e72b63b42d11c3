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

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_pulse.planner.cluster.cluster import Cluster, cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.partition.volume import relayed
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES, Device, Roofline
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import Tuning, analytic, decide

DTYPE = "float16"
OF_ALL = 4
"""Times as long for the tuner's own choice, of some thousand configs, as for one way."""

COLUMNS = (
    *("samples/s", "paper", "ratio", "of the peak, %", "the paper's, %"),
    *("bubble, %", "GB", "gap, %"),
)
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
_SD_1_7B = {"block_out_channels": [448, 960, 1792, 1792], "num_heads": [7, 15, 28, 28]}


def _ways(pulse: float, one_f_one_b: float, data: float) -> Mapping[str, float]:
    return {PULSE: pulse, ONE_F_ONE_B: one_f_one_b, DATA: data}


SETUPS = (
    Setup("SD v2 1.7B", "sd-v2-2.5b", _SD_1_7B, "pulse-v100:1", 32, {PULSE: 257.0}),
    Setup("U-ViT 1B", "uvit-1.4b", {**_UVIT, "depth": 32}, "pulse-v100:1", 32, {PULSE: 134.7}),
    Setup("U-ViT 2.7B", "uvit-2.7b", _UVIT, "pulse-v100", 32, _ways(141.5, 79.7, 128.1)),
    Setup("SD v2 4.6B", "sd-v2-4.6b", {}, "pulse-v100", 32, _ways(274.6, 114.8, 245.5)),
    Setup("Hunyuan-DiT 3B", "hunyuan-dit-3b", _HUNYUAN, "pulse-v100", 8, _ways(13.8, 8.6, 11.9)),
    Setup("U-ViT 2.7B", "uvit-2.7b", _UVIT, "pulse-910a", 32, _ways(237.8, 82.7, 103.0)),
    Setup("SD v2 4.6B", "sd-v2-4.6b", {}, "pulse-910a", 32, _ways(159.1, 55.4, 141.5)),
    Setup("Hunyuan-DiT 3B", "hunyuan-dit-3b", _HUNYUAN, "pulse-910a", 8, _ways(5.4, 4.0, 3.5)),
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


def main() -> None:
    """Print the table and what differs."""
    flags = Flags(__doc__)
    flags.add("--seconds", 6.0, "for each way")
    flags.add("--only", "", "backbones whose name has this in it")
    args = flags.parse_args()
    unit = Device("1 FLOP/s", dict.fromkeys(ELEMENT_BYTES, 1.0), 1e30, 1)
    orders, report = [], Report(args.json)
    for setup in (setup for setup in SETUPS if args.only in setup.backbone):
        where = cluster(setup.cluster)
        assert where.peaks is not None
        peak = where.num_devices * where.peaks.peak_flops[DTYPE]
        roofline = Roofline(where.peaks, DTYPE)
        profile = analytic(setup.backbone, setup.options, [1, 8], roofline)
        one = Roofline(unit, DTYPE, 1.0, 1.0, 0.0)
        flops = flops_per_sample(analytic(setup.backbone, setup.options, [1], one))
        size = sum(layer.parameters for layer in profile.layers)
        batch, reached = setup.samples_per_device * where.num_devices, {}
        for way in WAYS:
            seconds = args.seconds * (OF_ALL if way == "tuner" else 1)
            found = tuned(way, profile, where, batch, seconds)
            model = f"{setup.title} ({size / 1e9:.2f}e9)"
            row = {"model": model, "devices": f"{where.num_devices} {where.name}", "way": way}
            if found is None:
                report.add(row | {"config": "nothing fits"} | dict.fromkeys(COLUMNS))
                continue
            best, paper = found.outcomes[0], setup.measured.get(way)
            reached[way] = rate = best.throughput
            beside = (paper, rate / paper) if paper else (None, None)
            shares = 100 * rate * flops / peak, paper and 100 * paper * flops / peak
            gap = 0.0 if found.proved else 1 - found.bound_s / best.step_s
            held = max(best.memory_bytes) / 1e9
            figures = rate, *beside, *shares, 100 * best.bubble, held, 100 * gap
            cells = dict(zip(COLUMNS, figures, strict=True))
            report.add(row | {"config": str(best.config)} | cells)
        both = [way for way in setup.measured if way in reached]
        ours = sorted(both, key=lambda way: -reached[way])
        theirs = sorted(both, key=lambda way: -setup.measured[way])
        same = "the same order" if ours == theirs else f"the paper: {' > '.join(theirs)}"
        if len(both) > 1:
            orders.append(f"{setup.title} on {setup.cluster}: {' > '.join(ours)}; {same}")
    print("\nRank order, predicted:\n")
    print("\n".join(f"- {line}" for line in orders))


if __name__ == "__main__":
    main()
