"""Long video on four emulated devices: what ``long_video`` predicts, measured.

    .venv/bin/python -m tests.benchmarks.long_video_run --json long_video_run.json   # as root

Ranks are processes in network namespaces, joined by links of a limited rate (see ``headline``).
Operations sleep their profiled times on A100s with so much memory as is told; boundaries,
all-to-alls of context-parallel ranks, parameters and gradients travel as smaller tensors of the
right relative size. LoRA of rank 16, bfloat16. Contestants are those of ``long_video``; a row has
the measured samples/s of each at its best that fits, and beside it the predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.collectives import context_exchanges
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.context_rank import exchanging_s
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fsdp.baseline import FsdpBaseline
from megatron_pulse.profile.profile import Profile
from tests.benchmarks.cell import Result, require_network, run_cell
from tests.benchmarks.contestant import Contestant, Engine
from tests.benchmarks.emulation import PAYLOAD_SHARE, element_count, shrink
from tests.benchmarks.long_video import MODELS, backbone_of, profile_of
from tests.benchmarks.report import Flags, Report, count, positives, some_of
from tests.benchmarks.setups import USABLE, decide
from tests.benchmarks.token_sharing import TokenSharing

RANKS = 4

STEP_S = 12.0
"""Emulated step of the fastest contestant. Exchanges must exceed a link's bucket."""

FULL_RATE_GBS, FULL_RATE_BYTES_PER_S = 10.0, 80e6
"""Rate of a real link and what it becomes: more than in ``emulation``, for the same reason."""


@dataclass(frozen=True)
class Scale:
    """Emulated seconds over real ones, and real bytes over emulated ones."""

    time: float
    divisor: float

    @classmethod
    def of_step(cls, step_s: float) -> Scale:
        """Scale at which a step takes ``STEP_S``."""
        time = STEP_S / step_s
        return cls(time, 1e9 * FULL_RATE_GBS / (time * FULL_RATE_BYTES_PER_S))

    def elements(self, num_bytes: float, parts: int = 1) -> int:
        """Emulated fp32 elements, of which ``parts`` ranks have equally many."""
        return parts * math.ceil(element_count(num_bytes, self.divisor) / parts)

    def rate_mbit(self, gigabytes: float) -> float:
        """Limit of an emulated link: the payload's rate and what headers add to it."""
        return 8e-6 * 1e9 * gigabytes / (self.divisor * self.time) / PAYLOAD_SHARE


class Emulated:
    """Outcomes of one evaluator as contestants."""

    def __init__(self, evaluator: Evaluator, backbone: Backbone, scale: Scale) -> None:
        self.evaluator, self.backbone, self.scale = evaluator, backbone, scale

    def pipeline(self, name: str, outcome: Outcome) -> Contestant:
        """The product's executor, with or without context parallelism."""
        config, partition = outcome.config, outcome.stages.partition
        own = [list(partition.layers_of_stage(s)) for s in range(partition.placement.num_stages)]
        redone = outcome.stages.activations.recompute
        sharing, forward_s, recompute_s, backward_s = self._sharing(
            config.context, config.micro_batch_size, own, redone
        )
        scaled = {
            each: self._scaled(getattr(outcome.problem, each))
            for each in ("forward", "backward", "weight_grad", "recompute_s", "link")
        }
        minus = {
            "forward": forward_s,
            "weight_grad": [0.0] * len(own),
            "recompute_s": recompute_s,
            "backward": [a + b for a, b in zip(recompute_s, backward_s, strict=True)],
        }
        for each, seconds in minus.items():
            if scaled[each] is not None:
                pairs = zip(scaled[each], seconds, strict=True)
                least = 0.0 if each == "recompute_s" else 1e-6
                scaled[each] = tuple(max(least, t - self.scale.time * s) for t, s in pairs)
        parameters = outcome.stages.trained
        trained = tuple(self.scale.elements(2 * each, config.replicas) for each in parameters)
        divisor = self.scale.divisor * config.context
        return Contestant(
            name,
            Engine.OURS,
            config.num_microbatches(outcome.global_batch_size),
            partition,
            replace(outcome.problem, **scaled),
            outcome.synthesis.schedule,
            predicted_s=self.scale.time * (outcome.step_s - outcome.optimizer_s),
            saved_bytes=outcome.stages.saved_bytes,
            state_bytes=outcome.stages.state_bytes * config.replicas,
            way=str(config),
            micro_batch_size=config.micro_batch_size,
            backbone=shrink(self.backbone, config.micro_batch_size, divisor),
            sharing=replace(sharing, replicas=config.replicas, trained=trained),
        )

    def sharded(self, name: str, found: FsdpBaseline) -> Contestant:
        """FSDP2's or HSDP's communication, with or without context parallelism."""
        fitted, real = found.fitted, found.fitted.sharding
        own, redone = [list(each) for each in fitted.layers], fitted.activations.recompute
        size = fitted.config.micro_batch_size
        sharing, forward_s, recompute_s, backward_s = self._sharing(
            found.context, size, own, redone
        )
        time = self.scale.time
        units = tuple(
            replace(
                unit,
                forward_s=time * (unit.forward_s - forward),
                backward_s=time * (unit.backward_s - again - backward),
                moved_bytes=4 * self.scale.elements(unit.moved_bytes, RANKS),
                forward_exchange_s=0.0,
                backward_exchange_s=0.0,
            )
            for unit, forward, again, backward in zip(
                real.units, forward_s, recompute_s, backward_s, strict=True
            )
        )
        way = replace(real, units=units)
        return Contestant(
            name,
            Engine.FSDP2 if real.replicas == 1 else Engine.HSDP,
            way.count * RANKS,
            layers=tuple((u.forward_s, u.backward_s, u.moved_bytes // 4) for u in units),
            predicted_s=time * (found.step_s - found.optimizer_s),
            state_bytes=(0.0,) * RANKS,
            way=found.facts,
            micro_batch_size=size,
            sharding=way,
            sharing=sharing,
        )

    def _scaled(self, seconds: Any) -> Any:
        if seconds is None or isinstance(seconds, float):
            return seconds and self.scale.time * seconds
        return tuple(self.scale.time * each for each in seconds)

    def _sharing(
        self, context: int, samples: int, parts: Sequence[Sequence[int]], redone: Any
    ) -> tuple[TokenSharing, list[float], list[float], list[float]]:
        """Exchanges of each part's layers, and their real seconds in the prediction."""
        nothing = [0.0] * len(parts)
        costs = self.evaluator.profile.context
        if context == 1 or costs is None:
            none = ((),) * len(parts)
            return TokenSharing(1, 1, none, none, none), nothing, nothing, nothing
        ring = costs.is_ring(context)
        trains = self.evaluator.profile.has_backward

        def elements(layer: int, backward: bool) -> int:
            own = costs.layers[layer]
            calls = context_exchanges(own, samples, context, ring=ring, backward=backward)
            return self.scale.elements(sum(call.num_bytes for call in calls), context)

        def seconds(layer: int) -> tuple[float, float]:
            cluster = self.evaluator.cluster
            return exchanging_s(cluster, context, ring, costs.layers[layer], samples)

        def again(part: Sequence[int]) -> list[int]:
            return [i for i in part if i in redone and trains[i]]

        sharing = TokenSharing(
            context,
            1,
            tuple(tuple(elements(i, False) for i in part) for part in parts),
            tuple(tuple(elements(i, False) for i in again(part)) for part in parts),
            tuple(tuple(elements(i, True) for i in part if trains[i]) for part in parts),
        )
        return (
            sharing,
            [sum(seconds(i)[0] for i in part) for part in parts],
            [sum(seconds(i)[0] for i in again(part)) for part in parts],
            [sum(seconds(i)[1] for i in part if trains[i]) for part in parts],
        )


LIMITS: Mapping[str, Mapping[str, Any]] = {
    "pipeline": {"context": (1,), "pipeline": (2, 4)},
    "CP + pipeline": {"context": (2,), "pipeline": (2,)},
    "CP + DDP": {"context": (2, 4), "pipeline": (1,)},
}


def entered(
    evaluator: Evaluator, seconds: float
) -> Iterator[tuple[str, Outcome | FsdpBaseline | None]]:
    """Each way to train at its best that fits."""
    for name, limits in LIMITS.items():
        found = decide(evaluator, Choices(micro_batch_size=(1,), **limits), seconds)
        yield name, None if found is None else found.outcomes[0]
    yield "CP + FSDP2", evaluator.fsdp_baseline((1,), evaluator.costs.context_degrees()[1:])
    yield "FSDP2", evaluator.fsdp_baseline((1,), (1,))


def picked(evaluator: Evaluator, seconds: float) -> str:
    """The tuner's own choice, as its contestant's name."""
    found = decide(evaluator, Choices(micro_batch_size=(1,)), seconds, fsdp=True)
    if found is None:
        return "nothing fits"
    config = found.outcomes[0].config
    shares = "CP + " * (config.context > 1)
    if config.fsdp is not None:
        return f"{shares}FSDP2"
    if config.pipeline > 1:
        return f"{shares}pipeline"
    return f"{shares}DDP"


def node(rate: float, memory_gb: float) -> Cluster:
    """One node, whose devices each have a link of ``rate`` GB/s of their own."""
    link = ClusterLink("other", rate, 10.0, BandwidthScope.DEVICE)
    return Cluster("like", 1, RANKS, memory_gb, "A100-80GB", link, usable_memory=USABLE)


def row(name: str, profile: Profile, where: Cluster, samples: int, args: Any) -> dict[str, Any]:
    """Measured and predicted samples/s of one model over links of one rate."""
    evaluator = Evaluator(profile, where, samples, state=ParameterState())
    found = {each: one for each, one in entered(evaluator, args.decision_seconds) if one}
    rate = where.intra_node.bandwidth_gbs
    shown: dict[str, Any] = {"model": name, "GB": where.memory_gb, "GB/s": rate}
    names = (*LIMITS, "CP + FSDP2", "FSDP2")
    if not found:
        return {**shown, **dict.fromkeys(names), "the tuner's": "nothing fits"}
    scale = Scale.of_step(min(one.step_s for one in found.values()))
    emulated = Emulated(evaluator, backbone_of(name, adapted=True), scale)
    runs = [
        emulated.sharded(each, one)
        if isinstance(one, FsdpBaseline)
        else emulated.pipeline(each, one)
        for each, one in found.items()
    ]
    some = next(iter(run.backbone for run in runs if run.backbone), None) or emulated.backbone
    results = run_cell(
        some, runs, RANKS, scale.rate_mbit(rate), args.repetitions, short_queues=True
    )
    measured = {each.contestant: each for each in results}

    def rate_of(result: Result | None, seconds: float) -> float | None:
        return None if result is None else samples * scale.time / seconds

    return {
        **shown,
        **{each: rate_of(r := measured.get(each), r.median_s if r else 1.0) for each in names},
        **{
            f"{each}, predicted": rate_of(r := measured.get(each), r.predicted_s if r else 1.0)
            for each in names
        },
        "the tuner's": picked(evaluator, args.decision_seconds),
        **{f"{each}, config": r.way if (r := measured.get(each)) else None for each in names},
        "delay": max(max(each.delays) for each in results),
    }


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--models", ["wan-14b-81f-480p"], "with commas between", type=some_of(MODELS))
    flags.add("--memory-gb", [48.0], "of a device, with commas between", type=positives)
    flags.add("--rates", [10.0, 2.5], "GB/s, with commas between", type=positives)
    flags.add("--samples", 8, "of a step", type=count)
    flags.add("--repetitions", 1, "of each contestant", type=count)
    flags.add("--profiles", None, "folder that keeps costs", type=Path)
    flags.add("--decision-seconds", 6.0, "of processor time for each plan")
    args = flags.parse_args()
    require_network()
    report = Report(args.json)
    for name in args.models:
        profile = profile_of(name, True, args.profiles)
        for memory, rate in product(args.memory_gb, args.rates):
            where = node(rate, memory)
            report.add(row(name, profile, where, args.samples, args))


if __name__ == "__main__":
    main()
