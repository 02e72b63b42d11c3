"""The data of a cascade: what each chain takes of its own, side by side in every microbatch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import data_of_chains
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.faults import Faults, collecting
from megatron_pulse.integration.data import DiffusionData
from megatron_pulse.integration.flags.arguments import PulseOptions
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.runtime.settings import LossFunction

type Batches = Iterator[dict[str, Tensor]]


class CascadeData:
    """Opens the data of every chain as a run of that chain alone does (see ``DiffusionData``).

    ``--pulse-data base=DATA,upper=DATA`` names them. Raises Faults with everything that is wrong.
    """

    in_loop = None
    """Encoders of a cascade's data are not run in the loop."""

    def __init__(
        self, options: PulseOptions, backbone: Backbone, process: DiffusionProcess, seed: int
    ) -> None:
        faults: list[str] = []
        self.parts: dict[str, DiffusionData] = {}
        for chain, data in data_of_chains(options.data, tuple(backbone.parts)).items():
            own = replace(options, data=data, encoders=None)  # which are refused for a cascade
            with collecting(faults, (ValueError, OSError)):
                self.parts[chain] = DiffusionData(own, backbone.parts[chain], process, seed)
        if faults:
            raise Faults(faults)
        said = {f"{chain}: {part.description}" for chain, part in self.parts.items()}
        self.description = "; ".join(sorted(said))
        self.process = next(iter(self.parts.values())).process

    @property
    def num_corrupt(self) -> int:
        """How often a sample of training was replaced in this process, its image being corrupt."""
        return sum(part.num_corrupt for part in self.parts.values())

    @property
    def cautions(self) -> list[str]:
        """What of the training data is left aside, for people."""
        found = [caution for part in self.parts.values() for caution in part.cautions]
        return list(dict.fromkeys(found))

    @property
    def loss(self) -> Mapping[str, LossFunction]:
        """The loss of every chain."""
        return {chain: part.loss for chain, part in self.parts.items()}

    def place_encoders(self, plan: Plan, given: PlanFile | None) -> list[str]:
        """Why a plan's encoders cannot be run."""
        return [] if given is None else next(iter(self.parts.values())).place_encoders(plan, given)

    def iterators(self, args: argparse.Namespace, placement: Placement) -> tuple[Batches, Batches]:
        """(training, validation) microbatches of this rank, without end, as each chain alone has
        them."""
        found = {
            chain: part.iterators(args, placement, number)
            for number, (chain, part) in enumerate(self.parts.items())
        }
        training, validation = (
            _side_by_side({chain: each[which] for chain, each in found.items()}) for which in (0, 1)
        )
        return training, validation


def _side_by_side(batches: Mapping[str, Batches]) -> Batches:
    while True:
        yield {
            f"{chain}.{name}": value
            for chain, one in batches.items()
            for name, value in next(one).items()
        }
