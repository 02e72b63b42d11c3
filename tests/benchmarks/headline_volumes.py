"""Communication of a sample by each way, on the paper's backbones: exact, nothing is run.

Partitions balance the devices' computing alone (no link), as one who trains would cut; what a cut
for slow links then moves, and its time, is measured in ``claim``. ``relay apart`` sends a skip that
is the boundary tensor beside it, as a stage does that returns (h, *skips); ``relay`` once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_pulse.planner.layout.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.volume import relayed, volume

DEVICES = (2, 4, 8)
NAMES = ("sd-v2-4.6b", "uvit-2.7b", "hunyuan-dit-3b", "sdxl", "dit-xl-2")
PAPER = {
    "sd-v2-4.6b": (6.71, 61.05),
    "uvit-2.7b": (24.19, 102.80),
    "hunyuan-dit-3b": (95.29, 916.64),
}
"""MB a sample on V100s: PULSE, and 1F1B with relayed skips (the paper's table)."""


@dataclass(frozen=True)
class Moved:
    """MB of a sample, forward and gradients, over P devices; None where no cut is legal."""

    backbone: str
    num_devices: int
    fold_exact: float | None
    fold_soft: float
    relay: float
    relay_apart: float
    interleaved_relay: float
    direct: float

    @property
    def reduction(self) -> float:
        """The share of the relayed volume that the better fold saves."""
        return 1 - self.best / self.relay

    @property
    def best(self) -> float:
        """The fold that moves less."""
        return min(self.fold_soft, self.fold_exact or self.fold_soft)


def volumes() -> list[dict[str, Any]]:
    """All of them, for JSON."""
    return [asdict(moved(name, p)) for name in NAMES for p in DEVICES]


def moved(name: str, num_devices: int) -> Moved:
    """One backbone over ``num_devices``."""
    from tests.benchmarks.emulation import real_profile, setup_of

    size = setup_of(name).micro_batch_size
    costs = real_profile(name).at(size)

    def total(
        placement: Placement, collocate: bool = False, relays: bool = False, merged: bool = True
    ) -> float | None:
        travelling = relayed(costs) if relays else costs
        try:
            cut = find_partition(travelling, placement, Goal(collocate=collocate))
        except PartitionError:
            return None
        return volume(relayed(costs, merged) if relays else costs, cut).total / size / 1e6

    row, folded = sequential(num_devices), fold(num_devices)
    return Moved(
        name,
        num_devices,
        total(folded, collocate=True),
        total(folded) or 0.0,
        total(row, relays=True) or 0.0,
        total(row, relays=True, merged=False) or 0.0,
        total(interleaved(num_devices), relays=True) or 0.0,
        total(row) or 0.0,
    )
