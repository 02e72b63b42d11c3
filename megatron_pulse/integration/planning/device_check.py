"""Check at the start of a run that its devices are those that the plan was made for."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.integration.flags.startup_checks import FlagError, refusing
from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.planner.cluster.device_kinds import DeviceKind
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.profile.measurement.machine import device_memory, measured_device, num_threads
from megatron_pulse.profile.roofline import FIGURES, PRESETS, known_device
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.rendezvous import Job
from megatron_pulse.runtime.tensor_settings import compute_device

_REMEDY = (
    "Start nodes in the order of the cluster's file (torchrun --node-rank), and list a node's GPUs "
    "in its order (CUDA_VISIBLE_DEVICES); or make the plan anew for the cluster as it is ('pulse "
    "probe', 'pulse tune'; under --pulse-auto remove plan.json in --save)"
)
_LEAST_SHARE = 0.9
"""Share of a kind's memory below which a device is of another kind; makers round sizes."""


@dataclass(frozen=True)
class RankDevice:
    """Device on which a rank runs: the launcher's rank, host, device name, memory in bytes."""

    launcher_rank: int
    host: str
    name: str
    memory_bytes: int


def check_devices(given: PlanFile, job: Job) -> None:
    """Compare the job's devices with the plan's cluster, if that is mixed (collective).

    Raises FlagError on all ranks for each rank whose device cannot hold what the plan places there.
    Rank 0 warns of other devices than planned, and prints where ranks run if the plan orders them.
    """
    if given.device_order is None and not given.mixed:
        return
    with refusing(ClusterError, where="the plan: "):
        cluster = given.cluster
    place = compute_device()
    mine = RankDevice(
        job.launcher_rank,
        socket.gethostname(),
        measured_device(place, num_threads(place)),
        device_memory(place),
    )
    found = gather_objects(mine)
    if faults := list(_faults(given, cluster, found)):
        raise FlagError(faults)
    if job.rank:
        return
    if given.device_order is not None:
        placed = (f"{rank} {one.host}:{one.launcher_rank}" for rank, one in enumerate(found))
        print(f"device order (rank host:launcher's rank): {', '.join(placed)}", flush=True)
    for caution in _cautions(given, cluster, found):
        print(f"warning: {caution}", flush=True)


def _faults(given: PlanFile, cluster: Cluster, found: Sequence[RankDevice]) -> Iterator[str]:
    """Fault for each rank whose device has less usable memory than the plan fills there."""
    held, ranks = given.predicted["memory_bytes"], given.ranks
    needs = {rank: held[d] for d in range(given.pipeline) for rank in ranks.of_place(d)}
    for rank, one in enumerate(found):
        kind, needed = cluster.kind_of(rank), needs[rank]
        if needed > one.memory_bytes * kind.usable_memory:
            yield (
                f"{_named(rank, one)}: the plan places {needed / 1e9:.3g} GB there, for the kind "
                f"{kind.name} ({kind.memory_gb:g} GB, {kind.usable_memory:.0%} usable). {_REMEDY}"
            )


def _costed_device(given: PlanFile, kind: DeviceKind) -> str:
    """Name of the device whose costs the plan has for this kind."""
    if (times := given.profile.kinds.get(kind.name)) is not None:
        return times.device
    return given.profile.device


def _preset_or(name: str) -> str:
    known = None if name in PRESETS else known_device(name)
    return name if known is None else known.name


def _cautions(given: PlanFile, cluster: Cluster, found: Sequence[RankDevice]) -> Iterator[str]:
    """Warnings of devices and nodes that differ from the plan's."""
    others: dict[str, list[str]] = {}
    for rank, one in enumerate(found):
        kind = cluster.kind_of(rank)
        planned = _costed_device(given, kind)
        # Figures have no name.
        is_other = FIGURES not in planned and _preset_or(planned) != _preset_or(one.name)
        if is_other or one.memory_bytes < _LEAST_SHARE * 1e9 * kind.memory_gb:
            others.setdefault(kind.name, []).append(_named(rank, one))
    for name, named in others.items():
        more = f" and {len(named) - 1} more" * (len(named) > 1)
        yield f"{named[0]}{more} is not the planned {name}: times will differ. {_REMEDY}"
    hosts = [one.host for one in found]
    for rank in range(1, len(found)):
        together = cluster.node_of(rank - 1) == cluster.node_of(rank)
        if together != (hosts[rank - 1] == hosts[rank]):
            yield (
                f"{_named(rank, found[rank])} and {_named(rank - 1, found[rank - 1])} are on "
                f"{'one node' if together else 'two nodes'} of the plan's cluster, but not here: "
                f"messages will take other times. {_REMEDY}"
            )
            break


def _named(rank: int, device: RankDevice) -> str:
    has = f"{device.name}, {device.memory_bytes / 1e9:.3g} GB"
    return f"rank {rank} ({has}, launcher's rank {device.launcher_rank} on {device.host})"
