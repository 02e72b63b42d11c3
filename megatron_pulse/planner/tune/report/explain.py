"""Explanation of a search result: why the best config is the best, and how certain that is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.format import in_ms
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.device_orders import most_orders
from megatron_pulse.planner.tune.evaluate import Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit
from megatron_pulse.planner.tune.search.grouping import rival_names
from megatron_pulse.planner.tune.search.result import Tuning

NOTED = 1e-3
"""Share of a schedule's time above which waiting for other messages is reported."""


@dataclass(frozen=True)
class StepParts:
    """Breakdown of a step's seconds."""

    compute: float
    idle: float
    reduction: float
    optimizer: float


def parts(outcome: Outcome) -> StepParts:
    """Mean device's compute and idle time in the pipeline, exposed reduction, and optimizer."""
    compute = outcome.pipeline_s * (1 - outcome.bubble)
    idle = outcome.pipeline_s * outcome.bubble
    return StepParts(compute, idle, outcome.reduce_s, outcome.optimizer_s)


def explain(found: Tuning) -> list[str]:
    """Lines about the winner, and about the best of every other degree and layout."""
    best = found.outcomes[0]
    mine = parts(best)
    lines = [
        f"why {best.config}:",
        f"  step {in_ms(best.step_s)} on the mean device: compute {_share(mine.compute, best)}, "
        f"bubbles {_share(mine.idle, best)}, exposed gradient reduction "
        f"{_share(mine.reduction, best)}, optimizer {_share(mine.optimizer, best)}",
    ]
    if best.context_s:
        lines.append(
            f"  of the compute {_share(best.context_s, best)} are exchanges of the "
            f"{best.config.context} ranks that share tokens, on the device with most"
        )
    least, most = min(best.memory_bytes), max(best.memory_bytes)
    lines.append(f"  peak memory {least / 1e9:.3g} to {most / 1e9:.3g} GB per device")
    others = {
        name: rival
        for name, rival in sorted(found.rivals.items(), key=lambda item: item[1].step_s)
        if name not in rival_names(best.config)
    }
    told: dict[Config, list[str]] = {}
    for name, rival in others.items():
        told.setdefault(rival.config, []).append(name)
    for config, names in told.items():
        rival = others[names[0]]
        sizes = ", ".join(f"{found.simulated[name]:,}" for name in names)
        lines.append(
            f"  {', '.join(names)}: the fastest of {sizes} simulated is {config}: "
            f"{against(best, rival)}"
        )
    for degree in sorted(found.degrees):
        if f"P={degree}" not in found.rivals:
            counts = found.degrees[degree].most_common()
            said = "; ".join(f"{n} x {reason}" for reason, n in counts)
            lines.append(f"  P={degree}: none simulated ({said})")
    return lines


def against(best: Outcome, rival: Outcome) -> str:
    """Slowdown of ``rival`` against ``best``, by the parts of a step."""
    ours, theirs = parts(best), parts(rival)
    deltas = {
        "compute": theirs.compute - ours.compute,
        "bubbles": theirs.idle - ours.idle,
        "reduction": theirs.reduction - ours.reduction,
        "optimizer": theirs.optimizer - ours.optimizer,
    }
    lost = rival.step_s / best.step_s - 1
    told = [
        f"{name} {1e3 * delta:+{',.0f' if abs(delta) >= 1 else '.3g'}} ms"
        for name, delta in sorted(deltas.items(), key=lambda item: -abs(item[1]))
        if abs(delta) > 0.002 * best.step_s
    ]
    where = ", ".join(told) or "small differences in all parts"
    if not rival.extrapolated or best.extrapolated:
        return f"{abs(lost):.1%} {'slower' if lost >= 0 else 'faster'} ({where})"
    return (
        f"{abs(lost):.1%} {'slower' if lost >= 0 else 'faster'} in the simulated part of "
        f"the step ({where}); its whole step was not simulated, or does not fit in memory"
    )


def certainty(found: Tuning) -> list[str]:
    """Lines on the certainty of the result: schedule, simulated configs, all configs."""
    best, certificate = found.outcomes[0], found.outcomes[0].synthesis.certificate
    if best.extrapolated:
        schedule = f"searched for {best.problem.num_microbatches} microbatches only"
    elif certificate.proved:
        schedule = "optimal for this partition and memory limit"
    else:
        shorter = 1 - certificate.lower_bound / certificate.makespan
        schedule = f"at most {shorter:.1%} longer than optimal for this partition and memory limit"
    whole = "" if best.extrapolated else ", by whole steps"
    waits = best.timeline.makespan / certificate.makespan - 1
    if not best.extrapolated and waits > NOTED:
        schedule += f"; link contention makes the step {waits:.1%} longer"
    if found.proved:
        rest = "optimal for the partitions that were found; not all partitions were tried"
    else:
        better = 1 - found.bound_s / best.step_s
        most = f"at most {better:.1%} can be gained on the best step"
        rest = (
            f"{found.num_left:,} unexplored when the search ended; "
            f"{most if found.bound_s > 0 else 'their lower bound is unknown'}"
        )
        late = [degree for degree, counts in sorted(found.degrees.items()) if counts[Unfit.LATE]]
        if unseen := [f"P={p}" for p in late if f"P={p}" not in found.simulated]:
            rest += f"; none of {', '.join(unseen)} was simulated"
    return [
        f"schedule: {schedule}",
        f"of {found.num_simulated:,} simulated configs: the fastest{whole}",
        f"of all {found.num_configs:,} configs: {rest}",
    ]


def unordered(cluster: Cluster) -> str:
    """Limit of the search on unlike devices; empty on others."""
    if not cluster.mixed:
        return ""
    return f"; at most {most_orders(cluster)} orders of the devices are tried, with whole nodes"


def _share(seconds: float, outcome: Outcome) -> str:
    return f"{seconds / outcome.step_s:.1%}"
