"""Output of ``pulse partition`` as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.cli.output import first_and_last_layer, table
from megatron_pulse.format import in_mb, in_ms
from megatron_pulse.planner.layout.layouts import Layout
from megatron_pulse.planner.partition.find import BestPartition, PartitionError
from megatron_pulse.profile.profile import Profile


@dataclass(frozen=True)
class PartitionReport:
    """Partition, its inputs, the time of the search, and other layouts on request."""

    profile: Profile
    micro_batch_size: int
    recompute: bool
    costs: ChainCosts
    objective: str
    limit_bytes: float | None
    found: BestPartition
    seconds: float
    others: Mapping[Layout, BestPartition | PartitionError]

    @property
    def name(self) -> str:
        """Name of the backbone, or of the table."""
        return name_of(self.profile.backbone)

    @property
    def objective_value(self) -> float:
        """Value of the minimised objective in seconds."""
        found = self.found.evaluation
        return max(found.load_s if self.objective == "load" else found.stage_s)

    def headings(self) -> tuple[str, str]:
        """Title and subtitle of the picture."""
        moved, found = self.found.volume, self.found.evaluation
        placement = self.found.partition.placement
        return (
            f"{self.name}: {self.found.layout} on P = {placement.num_devices}, balance "
            f"{found.balance:.2f}",
            f"{self.profile.device}, {self.profile.dtype}, microbatch of {self.micro_batch_size}: "
            f"largest load {in_ms(max(found.load_s), 3)}; moves {in_mb(moved.total)} "
            f"(boundaries {moved.boundary / 1e6:.3g}, skips {moved.skip / 1e6:.3g})",
        )


def as_json(result: PartitionReport) -> dict[str, Any]:
    """Results as JSON-able values; bytes are forward and gradients together."""
    found, evaluation = result.found, result.found.evaluation
    partition = found.partition
    placement = partition.placement
    record: dict[str, Any] = {
        "backbone": dict(result.profile.backbone),
        "device": result.profile.device,
        "dtype": result.profile.dtype,
        "micro_batch_size": result.micro_batch_size,
        "extrapolated": result.profile.extrapolates(result.micro_batch_size),
        "recompute": result.recompute,
        "layout": found.layout.name,
        "placement": placement.kind.name,
        "num_devices": placement.num_devices,
        "stages": [
            [result.costs.names[i] for i in partition.layers_of_stage(stage)]
            for stage in range(placement.num_stages)
        ],
        "device_of_stage": list(placement.device_of_stage),
        "load_s": list(evaluation.load_s),
        "compute_s": list(evaluation.compute_s),
        "balance": evaluation.balance,
        "memory_bytes": [round(held) for held in evaluation.memory_bytes],
        "memory_limit_bytes": None if result.limit_bytes is None else round(result.limit_bytes),
        "bytes_per_microbatch": {"boundary": found.volume.boundary, "skip": found.volume.skip},
        "objective": result.objective,
        "objective_value": result.objective_value,
        "seconds": result.seconds,
    }
    if result.others:
        record["comparison"] = [_row(layout, other) for layout, other in result.others.items()]
    return record


def _row(layout: Layout, other: BestPartition | PartitionError) -> dict[str, Any]:
    if isinstance(other, PartitionError):
        return {"layout": layout.name, "infeasible": str(other)}
    moved = other.volume
    return {
        "layout": layout.name,
        "total": moved.total,
        "boundary": moved.boundary,
        "skip": moved.skip,
        "hottest_device": moved.hottest,
        "balance": other.evaluation.balance,
        "largest_load_s": max(other.evaluation.load_s),
        "memory_bytes": round(max(other.evaluation.memory_bytes)),
    }


def report(result: PartitionReport) -> list[str]:
    """Lines of the report: devices, totals, and the comparison if there is one."""
    profile, found, costs = result.profile, result.found, result.costs
    placement, size = found.partition.placement, result.micro_batch_size
    lines = [
        f"{result.name}: {len(costs.names)} layers, {len(costs.skips)} skips; "
        f"{found.layout} on {placement.num_devices} device(s), smallest {result.objective}",
        f"costs: {profile.source}, {profile.device}, {profile.dtype}, microbatches of {size}"
        + ", activations recomputed" * result.recompute,
        profile.method,
    ]
    if profile.extrapolates(size):
        sizes = ", ".join(map(str, profile.micro_batch_sizes))
        lines.append(f"note: the profile is of microbatches of {sizes}; {size} is extrapolated")
    lines += ["", *_device_table(result), "", *_totals(result)]
    if result.others:
        lines += ["", *_comparison(result.others)]
    return lines


def _device_table(result: PartitionReport) -> list[str]:
    costs, partition = result.costs, result.found.partition
    found, placement = result.found.evaluation, partition.placement
    mean = sum(found.compute_s) / len(found.compute_s)
    rows: list[tuple[str, ...]] = [_TITLES, _UNITS]
    for device in range(placement.num_devices):
        stages = placement.stages_of_device(device)
        layers = [i for stage in stages for i in partition.layers_of_stage(stage)]
        forward = sum(costs.forward_s[i] for i in layers)
        compute, load = found.compute_s[device], found.load_s[device]
        row: tuple[str, ...] = (
            str(device),
            f"{1e3 * forward:.3f}",
            f"{1e3 * (compute - forward):.3f}",
            f"{1e3 * (load - compute):.3f}",
            f"{1e3 * load:.3f}",
            f"{compute / mean if mean else 1:.3f}",
            f"{sum(costs.parameters[i] for i in layers) / 1e6:.1f}",
            f"{found.memory_bytes[device] / 1e9:.2f}",
        )
        for stage in stages:
            held = first_and_last_layer(partition.layers_of_stage(stage), costs.names)
            rows.append((*row, f"{stage}: {held}"))
            row = ("",) * len(row)
    return table(rows, left=(-1,))


_TITLES = (
    *("device", "forward", "backward", "messages", "load", "of mean", "parameters", "memory"),
    "stages",
)
_UNITS = ("", "ms", "ms", "ms", "ms", "", "M", "GB", "")


def _totals(result: PartitionReport) -> list[str]:
    found, moved = result.found.evaluation, result.found.volume
    largest = max(found.load_s)
    rate = f"{result.micro_batch_size / largest:.4g}" if largest else "any number of"
    limit = "no limit" if result.limit_bytes is None else f"of {result.limit_bytes / 1e9:.4g} GB"
    return [
        f"balance {found.balance:.3f} (largest compute time over the mean); largest load "
        f"{1e3 * largest:.3f} ms",
        f"at most {rate} samples/s on each pipeline, without bubbles",
        f"a microbatch moves {moved.total / 1e6:.2f} MB, forward and gradients: boundaries "
        f"{moved.boundary / 1e6:.2f}, skips {moved.skip / 1e6:.2f}; the hottest device "
        f"{moved.hottest / 1e6:.2f}",
        f"memory at most {max(found.memory_bytes) / 1e9:.2f} GB ({limit}); searched "
        f"{result.seconds:.3g} s",
    ]


def _comparison(others: Mapping[Layout, BestPartition | PartitionError]) -> list[str]:
    """Row for each layout; the best value of a column has a star."""
    columns: Sequence[tuple[str, str, float]] = (
        ("total MB", "total", 1e-6),
        ("skips MB", "skip", 1e-6),
        ("hottest MB", "hottest_device", 1e-6),
        ("balance", "balance", 1.0),
        ("largest load ms", "largest_load_s", 1e3),
        ("memory GB", "memory_bytes", 1e-9),
    )
    rows = [_row(layout, other) for layout, other in others.items()]
    known = [row for row in rows if "infeasible" not in row]
    least = {key: min(row[key] for row in known) for _, key, _ in columns} if known else {}
    cells: list[tuple[str, ...]] = [("layout", *(f"{title} " for title, _, _ in columns))]
    for row in known:
        stars = (
            f"{row[key] * scale:.3f}{'*' if row[key] == least[key] else ' '}"
            for _, key, scale in columns
        )
        cells.append((row["layout"], *stars))
    return [
        *table(cells, left=(0,)),
        *(f"{row['layout']}: {row['infeasible']}" for row in rows if "infeasible" in row),
        "* smallest. Bytes of a microbatch, forward and gradients; each layout at its best",
    ]
