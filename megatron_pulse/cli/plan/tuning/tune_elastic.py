"""``pulse tune --worlds``: elastic plans, for a run that continues with fewer devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.flag_checks import as_user_error, require
from megatron_pulse.cli.output import print_result
from megatron_pulse.cli.plan.tuning.tune_input import choices_of
from megatron_pulse.cli.plan.tuning.tune_slices import search_with_slices
from megatron_pulse.cli.shared_flags import numbers

if TYPE_CHECKING:
    from megatron_pulse.planner.cluster.cluster import Cluster
    from megatron_pulse.planner.tune.evaluate import Outcome
    from megatron_pulse.profile.profile import Profile


def elastic_clusters(args: argparse.Namespace, where: Cluster) -> dict[int, Cluster]:
    """Parts of the cluster with the numbers of devices of ``--worlds``, the largest first."""
    worlds = sorted(numbers(args.world_sizes) or (), reverse=True)
    parts = {world: where.part(world) for world in worlds}
    require(
        [
            f"--world-sizes {world}: {where.name} has {where.nodes} node(s) of "
            f"{where.devices_per_node} devices: give whole nodes of it, or part of one"
            for world, part in parts.items()
            if part is None
        ]
        + _unlike(where, worlds)
    )
    return {world: part for world, part in parts.items() if part is not None}


def _unlike(where: Cluster, worlds: Sequence[int]) -> list[str]:
    """Faults of parts of a mixed cluster that may be of other devices than the plan's."""
    if where.alike_nodes:
        worlds = [n for n in worlds if where.mixed and n % where.devices_per_node]
    elif not worlds:
        return []
    return [
        f"--world-sizes {world}: {where.name} has unlike devices, and nobody knows which are "
        "left. Give whole nodes of a cluster of equal nodes, or tune a file of what is left"
        for world in worlds
        if world != where.num_devices
    ]


def tune_worlds(args: argparse.Namespace, profile: Profile, parts: Mapping[int, Cluster]) -> None:
    """Search a plan for each number of devices, and write a folder of them.

    A run takes its optimizer state from plan to plan. All plans therefore agree on the distributed
    optimizer. Existing plans decide about it, or else the first one.
    """
    from megatron_pulse.cli.plan.tuning.tune_report import as_json
    from megatron_pulse.planner.plan_file.elastic import distributed_optimizer_of_folder, world_file
    from megatron_pulse.planner.plan_file.plan_file import save_plan
    from megatron_pulse.planner.tune.plans.to_plan import plan_of
    from megatron_pulse.planner.tune.tune import UntunableError

    choices = choices_of(args)
    with as_user_error(ValueError):
        there = distributed_optimizer_of_folder(args.output, list(parts))
    if there is not None:
        choices = replace(choices, distributed_optimizer=(there,))
    lines: list[str] = []
    records: dict[str, Any] = {}
    best_of: dict[int, Outcome] = {}
    faults: list[str] = []
    for world, part in parts.items():
        try:
            found, evaluator = search_with_slices(args, profile, part, choices)
        except UntunableError as error:
            beside = (
                f" (with the distributed optimizer as for {next(iter(records))} devices)"
                if records
                else ""
            )
            faults.append(f"--world-sizes {world}: {error}{beside}")
            continue
        best = found.outcomes[0]
        choices = replace(choices, distributed_optimizer=(best.config.distributed_optimizer,))
        file = world_file(args.output, world)
        save_plan(plan_of(best, evaluator, found), file)
        lines.append(f"{world} devices: {best.config}; {best.throughput:.4g} samples/s; {file}")
        if found.fsdp_baseline is not None and found.fsdp_baseline.throughput > best.throughput:
            lines.append(f"  {found.fsdp_baseline.beside(best.throughput)}")
        records[str(world)], best_of[world] = as_json(found, evaluator, None), best
    if best_of:
        lines += _faster_with_fewer(best_of, args.seconds)
    print_result(args, lines, lambda: records)
    require(faults)


def _faster_with_fewer(best_of: Mapping[int, Outcome], seconds: float) -> list[str]:
    """Note that a part of the devices trains faster than more of them, if so."""
    fastest = max(best_of, key=lambda world: best_of[world].throughput)
    most = max(best_of)
    if fastest == most:
        return []
    more = best_of[fastest].throughput / best_of[most].throughput - 1
    return [
        f"{fastest} devices are predicted to train this batch {more:.1%} faster than {most}, after "
        f"{seconds:g} s of search each: give more --seconds, use fewer devices, or a larger batch"
    ]
