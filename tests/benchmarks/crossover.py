"""The bandwidth at which FSDP2 at its best comes to the tuner's pick: below it the pick is ahead.

    python -m tests.benchmarks.crossover --json crossover.json
    python -m tests.benchmarks.crossover --table layers.json --memory-gb 80 --samples 8

Predicted, on analytic V100s under one cap on memory; nothing is run. Where FSDP2 would be as fast
as the pick at one bandwidth, the tuner is asked again, until both agree. Where a search for a lower
bandwidth found something better, that counts: it is no slower over faster links.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.profile_from_table import read_table
from tests.benchmarks.arguments import count, positive, positives, some_of
from tests.benchmarks.decide import decide
from tests.benchmarks.emulation import BACKBONES, V100, more_sizes, real_profile, setup_of

USABLE = 0.9

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

    def cluster(self, rate: float) -> Cluster:
        """Devices each with a link of ``rate`` GB/s of its own."""
        link = ClusterLink("other", rate, 10.0, BandwidthScope.DEVICE)
        of = self.num_devices, 1, self.memory_gb, "V100-32GB"
        return Cluster("crossover", *of, link, link, usable_memory=USABLE)

    def best(self, rate: float) -> tuple[float, str]:
        """Samples/s of the best pick for this bandwidth or a lower one, which is no slower here."""
        rates = [tried for tried in self.tried if tried <= rate]
        return max((self.picked(tried) for tried in {*rates, rate}), key=lambda found: found[0])

    @cache  # noqa: B019
    def picked(self, rate: float) -> tuple[float, str]:
        """The tuner's samples/s, and its pick."""
        self.tried.append(rate)
        evaluator = Evaluator(self.profile, self.cluster(rate), self.samples)
        choices = Choices(tensor=(1,), micro_batch_size=self.profile.micro_batch_sizes)
        found = decide(evaluator, choices, self.search_s)
        if found is None:
            return 0.0, "nothing fits"
        return found.outcomes[0].throughput, str(found.outcomes[0].config)

    def sharded(self, rate: float) -> float:
        """FSDP2's or HSDP's samples/s."""
        found = Evaluator(self.profile, self.cluster(rate), self.samples).fsdp_baseline()
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
        rate: float | None = FIRST
        for _ in range(MOST_SEARCHES):
            assert rate is not None
            throughput, pick = self.best(rate)
            if not throughput:
                return None, pick
            met = self.meets(throughput)
            if met is None or met <= NEAR * rate:
                return met, pick
            rate = met
        return rate, pick


def _rate(throughput: float) -> str:
    return f"{throughput:.3g}" if throughput else "does not fit"


def chains(args: argparse.Namespace) -> Iterator[tuple[str, Profile, int]]:
    """Name, profile and usual samples of each."""
    if args.table is not None:
        profile = read_table(args.table, V100, (1,))
        yield args.table.stem, profile, args.samples
        return
    for name in args.backbones:
        setup = setup_of(name)
        each = setup.micro_batch_size * setup.microbatches_per_device
        yield name, real_profile(name, more_sizes(name)), each * args.ranks


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    known = ", ".join(BACKBONES)
    add("--backbones", type=some_of(BACKBONES), default=list(BACKBONES), help=f"of {known}")
    add("--table", type=Path, help="of layers, instead of backbones")
    add("--samples", type=count, default=8, help="of a table's step, usually (default: 8)")
    add("--ranks", type=count, default=4, help="devices (default: 4)")
    add("--memory-gb", type=positive, default=32.0, help="of a device (default: 32)")
    add("--batches", type=count, nargs="+", default=[1, 4], help="times the usual (default: 1 4)")
    add("--rates", type=positives, default=[10.0, 2.5], help="GB/s (default: 10,2.5)")
    add("--seconds", type=positive, default=20.0, help="of processor time a search (default: 20)")
    add("--json", type=Path, help="write rows here")
    args = parser.parse_args()
    if args.table is not None and not args.table.is_file():
        parser.error(f"--table {args.table}: there is no such file")
    rows = []
    at = " | ".join(f"{rate:g} GB/s: pick, FSDP2" for rate in args.rates)
    print(f"| backbone | samples | crossover, GB/s | the pick there | {at} |")
    print("|" + "---|" * (4 + len(args.rates)))
    for name, profile, usual in chains(args):
        for batch in args.batches:
            samples = batch * usual
            place = Place(profile, args.ranks, args.memory_gb, samples, args.seconds)
            for rate in args.rates:
                place.picked(rate)
            met, pick = place.crossover()
            both = {rate: (place.best(rate)[0], place.sharded(rate)) for rate in args.rates}
            told = " | ".join(", ".join(map(_rate, pair)) for pair in both.values())
            where = "none" if met is None else f"{met:.3g}"
            print(f"| {name} | {samples} | {where} | {pick} | {told} |", flush=True)
            rows.append(
                {
                    "backbone": name,
                    "samples": samples,
                    "crossover_gb_per_s": met,
                    "pick": pick,
                    "samples_per_s": {f"{rate:g}": pair for rate, pair in both.items()},
                }
            )
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
