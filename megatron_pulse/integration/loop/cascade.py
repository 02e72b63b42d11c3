"""The data of a cascade: what each chain takes of its own, side by side in every microbatch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import data_of_chains, encoders_of_chains
from megatron_pulse.data.record import DataRecord
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.faults import Faults, collecting
from megatron_pulse.integration.data import DiffusionData
from megatron_pulse.integration.encoding import Encoders
from megatron_pulse.integration.flags.arguments import PulseOptions
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.operations import Filler
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.runtime.settings import LossFunction

type Batches = Iterator[dict[str, Tensor]]


class CascadeData:
    """Opens the data of every chain as a run of that chain alone does (see ``DiffusionData``).

    ``--pulse-data base=DATA,upper=DATA`` names them, ``--pulse-encoders`` the encoders of all or of
    some. Raises Faults with everything that is wrong.
    """

    def __init__(
        self, options: PulseOptions, backbone: Backbone, process: DiffusionProcess, seed: int
    ) -> None:
        faults: list[str] = []
        self.parts: dict[str, DiffusionData] = {}
        folders = encoders_of_chains(options.encoders, tuple(backbone.parts))
        for chain, data in data_of_chains(options.data, tuple(backbone.parts)).items():
            name, folder = backbone.parts[chain].name, folders[chain]
            own = replace(options, backbone=name, data=data, encoders=folder)
            with collecting(faults, (ValueError, OSError)):
                self.parts[chain] = DiffusionData(own, backbone.parts[chain], process, seed)
        if faults:
            raise Faults(faults)
        said = {f"{chain}: {part.description}" for chain, part in self.parts.items()}
        self.description = "; ".join(sorted(said))
        self.process = next(iter(self.parts.values())).process

    def survey(self) -> list[str]:
        """Description of the image files of every chain, for people (see ``DiffusionData``)."""
        told = [line for part in self.parts.values() for line in part.survey()]
        return list(dict.fromkeys(told))

    def count_corrupt(self) -> int:
        """Number of files all ranks have passed over in training, being corrupt (collective)."""
        return sum(part.count_corrupt() for part in self.parts.values())

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
        """Put the encoders of every chain on all devices; why it cannot be."""
        return [fault for part in self.parts.values() for fault in part.place_encoders(plan, given)]

    def describe_encoders(self, fillers: Sequence[Filler], num_devices: int) -> list[str]:
        """Which encoder of the loop runs when and where, for people."""
        return [
            f"{chain}: {said}"
            for chain, part in self.parts.items()
            for said in part.describe_encoders(fillers, num_devices)
        ]

    @property
    def encoded_by(self) -> dict[str, str]:
        """Which files the encoders of the loops are of, by chain and folder (``upper.vae``)."""
        found: dict[str, str] = {}
        for chain, part in self.parts.items():
            found |= {f"{chain}.{name}": by for name, by in part.encoded_by.items()}
        return found

    def record(self, whole: bool) -> dict[str, list[DataRecord]]:
        """The records of every chain's datasets (see ``DiffusionData``)."""
        return {chain: part.record(whole)[""] for chain, part in self.parts.items()}

    @property
    def encoders(self) -> Mapping[str, Callable[[int], Encoders]]:
        """Of every chain whose samples are encoded in the loop, those of a pipeline device."""
        return {c: part.encoders for c, part in self.parts.items() if part.in_loop is not None}

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
