"""The bandwidth at which FSDP2 at its best comes to the tuner's pick: below it the pick is ahead.

    .venv/bin/python -m tests.benchmarks.crossover --json crossover.json
    .venv/bin/python -m tests.benchmarks.crossover --table layers.json --memory-gb 80 --samples 8

Predicted, on analytic V100s under one cap on memory; nothing is run. Where FSDP2 would be as fast
as the pick at one bandwidth, the tuner is asked again, until both agree. Where a search for a lower
bandwidth found something better, that counts: it is no slower over faster links.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.fsdp.baseline import fsdp_baseline
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.profile_from_table import read_table
from tests.benchmarks.emulation import BACKBONES, more_sizes, real_profile, setup_of
from tests.benchmarks.report import Flags, Report, count, existing, positives, some_of
from tests.benchmarks.setups import V100, cluster_of, decide

SLOWEST, FASTEST = 0.1, 1000.0
"""GB/s between which FSDP2 is asked for what it comes to."""

NEAR = 1.01
"""Bandwidths that differ by less are one."""

FIRST = 1.25
"""GB/s of the first search."""

MOST_SEARCHES = 8


@dataclass(frozen=True, eq=False)
class Place:
    """A backbone's profile, devices of so many GB, and the samples of a step."""

    profile: Profile
    num_devices: int
    memory_gb: float
    samples: int
    search_s: float
    tried: list[float] = field(default_factory=list)

    def evaluator(self, rate: float) -> Evaluator:
        """Over links of ``rate`` GB/s."""
        cluster = cluster_of(self.num_devices, rate, self.memory_gb)
        return Evaluator(self.profile, cluster, self.samples)

    def best(self, rate: float) -> tuple[float, str]:
        """Samples/s of the best pick for this bandwidth or a lower one, which is no slower here."""
        rates = [tried for tried in self.tried if tried <= rate]
        return max((self.picked(tried) for tried in {*rates, rate}), key=lambda found: found[0])

    @cache  # noqa: B019
    def picked(self, rate: float) -> tuple[float, str]:
        """The tuner's samples/s, and its pick."""
        self.tried.append(rate)
        choices = Choices(tensor=(1,), micro_batch_size=self.profile.micro_batch_sizes)
        found = decide(self.evaluator(rate), choices, self.search_s)
        if found is None:
            return 0.0, "nothing fits"
        return found.outcomes[0].throughput, str(found.outcomes[0].config)

    def sharded(self, rate: float) -> float:
        """FSDP2's or HSDP's samples/s, with gradients reduced in half precision."""
        own = self.evaluator(rate)
        of = own.profile, own.cluster, self.samples
        found = fsdp_baseline(*of, own.estimator.adam_s, own.state.ema)
        return 0.0 if found is None else found.throughput

    def meets(self, throughput: float) -> float | None:
        """GB/s at which FSDP2 comes to ``throughput``; None where no bandwidth is enough."""
        if self.sharded(FASTEST) < throughput:
            return None
        low, high = SLOWEST, FASTEST
        while high / low > NEAR:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.sharded(middle) >= throughput else (middle, high)
        return high

    def crossover(self) -> tuple[float | None, str]:
        """GB/s, and the pick there."""
        rate = FIRST
        for _ in range(MOST_SEARCHES):
            throughput, pick = self.best(rate)
            met = self.meets(throughput) if throughput else None
            if met is None or met <= NEAR * rate:
                return met, pick
            rate = met
        return rate, pick


def chains(args: argparse.Namespace) -> Iterator[tuple[str, Profile, int]]:
    """Name, profile and usual samples of each."""
    if args.table is not None:
        yield args.table.stem, read_table(args.table, V100, (1,)), args.samples
        return
    for name in args.backbones:
        setup = setup_of(name)
        each = setup.micro_batch_size * setup.microbatches_per_device
        yield name, real_profile(name, more_sizes(name)), each * args.ranks


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--backbones", list(BACKBONES), "with commas between", type=some_of(BACKBONES))
    flags.add("--table", help="of layers, instead of backbones", type=existing)
    flags.add("--samples", 8, "of a table's step, usually")
    flags.add("--ranks", 4, "devices")
    flags.add("--memory-gb", 32.0, "of a device")
    flags.add("--batches", [1, 4], "times the usual", type=count, nargs="+")
    flags.add("--rates", [10.0, 2.5], "GB/s, with commas between", type=positives)
    flags.add("--seconds", 20.0, "of processor time a search")
    args = flags.parse_args()
    report = Report(args.json)
    for name, profile, usual in chains(args):
        for batch in args.batches:
            samples = batch * usual
            place = Place(profile, args.ranks, args.memory_gb, samples, args.seconds)
            for rate in args.rates:
                place.picked(rate)
            met, pick = place.crossover()
            row = {"backbone": name, "samples": samples, "crossover GB/s": met, "the pick": pick}
            for rate in args.rates:
                row[f"{rate:g} GB/s: pick, FSDP2"] = place.best(rate)[0], place.sharded(rate)
            report.add(row)


if __name__ == "__main__":
    main()
