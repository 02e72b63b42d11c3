"""Data of a cascade: the fields of all chains, side by side in every microbatch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import data_of_chains, encoders_of_chains
from megatron_pulse.data.data_record import DataRecord
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.encoders.text_recipe import is_text
from megatron_pulse.errors import Faults, collecting
from megatron_pulse.integration.experts import processes_of_experts
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.loop_encoders import DeviceEncoders
from megatron_pulse.integration.training_data import DiffusionData
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.operations import BubbleTask
from megatron_pulse.runtime.tensor_settings import LossFunction

type Batches = Iterator[dict[str, Tensor]]


class CascadeData:
    """Data of every chain, opened as for a run of that chain alone (see ``DiffusionData``).

    ``--pulse-data base=DATA,upper=DATA`` names them, or one for all, and ``--pulse-encoders`` the
    encoders of all or of some. ``--pulse-encoder-dropout`` is for chains that read texts.
    ``--pulse-boundary-ratio`` makes two chains the experts of one model, each with its range of
    times. Raises Faults with all faults.
    """

    def __init__(
        self,
        options: PulseOptions,
        backbone: Backbone,
        process: DiffusionProcess,
        seed: int,
        images: OpenedImages | None = None,
    ) -> None:
        faults: list[str] = []
        self.parts: dict[str, DiffusionData] = {}
        parts = backbone.parts.values()
        reads_texts = any(is_text(name) for part in parts for name in part.batch_fields)
        chains = tuple(backbone.parts)
        folders = encoders_of_chains(options.encoders, chains)
        processes = dict.fromkeys(chains, process)
        if options.boundary_ratio is not None:
            with collecting(faults):
                processes = processes_of_experts(process, backbone, options.boundary_ratio)
        data_of: Mapping[str, str] = {}
        with collecting(faults):
            data_of = data_of_chains(options.data, chains)
        for chain, data in data_of.items():
            part, folder = backbone.parts[chain], folders[chain]
            own = replace(options, backbone=part.name, data=data, encoders=folder)
            if not any(map(is_text, part.batch_fields)):
                own = replace(own, encoder_dropout={})
            with collecting(faults, (ValueError, OSError)):
                self.parts[chain] = DiffusionData(own, part, processes[chain], seed, images)
        if options.encoder_dropout and not reads_texts:
            faults.append("--pulse-encoder-dropout: no chain reads texts; leave it out")
        if faults:
            raise Faults(faults)
        said = {f"{chain}: {part.description}" for chain, part in self.parts.items()}
        self.description = "; ".join(sorted(said))
        self.process = next(iter(self.parts.values())).process

    def survey(self) -> list[str]:
        """Descriptions of the image files of every chain (see ``DiffusionData``)."""
        told = [line for part in self.parts.values() for line in part.survey()]
        return list(dict.fromkeys(told))

    def count_corrupt(self) -> int:
        """Number of corrupt training files that all ranks have skipped (collective)."""
        return sum(part.count_corrupt() for part in self.parts.values())

    @property
    def cautions(self) -> list[str]:
        """Notes on training data left unused, for the log."""
        found = [caution for part in self.parts.values() for caution in part.cautions]
        return list(dict.fromkeys(found))

    @property
    def loss(self) -> Mapping[str, LossFunction]:
        """Loss function of every chain."""
        return {chain: part.loss for chain, part in self.parts.items()}

    @property
    def sample_losses(self) -> Mapping[str, LossFunction]:
        """Validation losses of samples, by chain (see ``DiffusionData``)."""
        return {chain: part.sample_losses for chain, part in self.parts.items()}

    @property
    def num_validation(self) -> Mapping[str, int]:
        """Number of validation losses of every chain."""
        return {chain: part.num_validation for chain, part in self.parts.items()}

    @property
    def waited_s(self) -> float:
        """Seconds for which this process has waited for training microbatches."""
        return sum(part.waited_s for part in self.parts.values())

    def place_encoders(self, plan: Plan, given: PlanFile | None) -> list[str]:
        """Assign the encoders of every chain to all devices; return the faults."""
        return [fault for part in self.parts.values() for fault in part.place_encoders(plan, given)]

    def describe_encoders(self, bubble_tasks: Sequence[BubbleTask], num_devices: int) -> list[str]:
        """Lines on when and where each encoder in the loop runs."""
        return [
            f"{chain}: {said}"
            for chain, part in self.parts.items()
            for said in part.describe_encoders(bubble_tasks, num_devices)
        ]

    @property
    def encoded_by(self) -> dict[str, str]:
        """Digests of the encoders in the loop, by chain and folder (``upper.vae``)."""
        found: dict[str, str] = {}
        for chain, part in self.parts.items():
            found |= {f"{chain}.{name}": by for name, by in part.encoded_by.items()}
        return found

    @property
    def several_shapes(self) -> bool:
        """True if a chain's samples have several shapes."""
        return any(part.several_shapes for part in self.parts.values())

    def record(self, whole: bool) -> dict[str, list[DataRecord]]:
        """The records of every chain's datasets (see ``DiffusionData``)."""
        return {chain: part.record(whole)[""] for chain, part in self.parts.items()}

    @property
    def encoders(self) -> Mapping[str, Callable[[int], DeviceEncoders]]:
        """Loader of a pipeline device's encoders, for every chain encoded in the loop."""
        return {c: part.encoders for c, part in self.parts.items() if part.in_loop is not None}

    def iterators(self, args: argparse.Namespace, plan: Plan) -> tuple[Batches, Batches]:
        """Endless (training, validation) microbatches of this rank, as for each chain alone."""
        found = {
            chain: part.iterators(args, plan, number)
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
