"""The data of a run: its diffusion process, its datasets, and each rank's microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from megatron.core import parallel_state
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import Wanted
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.objectives import (
    DiffusionProcess,
    NoiseSchedule,
    Objective,
    TimestepDensity,
    predicted_mean,
)
from megatron_pulse.integration.arguments import PulseOptions
from megatron_pulse.planner.placement import Placement


def make_process(options: PulseOptions) -> DiffusionProcess:
    """The diffusion process that the flags describe."""
    return DiffusionProcess(
        Objective(options.objective),
        NoiseSchedule(options.noise_schedule),
        density=TimestepDensity(
            options.timestep_density if options.objective == Objective.FLOW else "uniform"
        ),
    )


def null_label_of(backbone: Backbone) -> int | None:
    """The label that stands for "no class"; None where the backbone reads no labels."""
    if "labels" not in backbone.batch_fields:
        return None
    return int(backbone.record["options"].get("num_classes") or 0)


def wanted_by(backbone: Backbone) -> Wanted:
    """What ``backbone`` takes of every sample, in the terms of the data room."""
    return Wanted(
        shape=backbone.input_spec.shape,
        fields={
            name: FieldSpec(spec.shape, spec.dtype)
            for name, spec in backbone.batch_fields.items()
            if name not in ("timesteps", "labels")
        },
        num_classes=null_label_of(backbone),
    )


class DiffusionData:
    """Opens ``--pulse-data`` for ``backbone``.

    Raises DataError if the data lack a field that the backbone reads, or do not fit otherwise,
    with everything that is wrong.
    """

    def __init__(self, options: PulseOptions, backbone: Backbone, seed: int) -> None:
        self.process = make_process(options)
        self._seed = seed
        self._class_dropout = options.class_dropout
        self._null_label = null_label_of(backbone)
        self._num_channels = backbone.input_spec.shape[0]
        self._require_prediction(backbone)
        self.train, self.validation = open_dataset(
            options.data, wanted=wanted_by(backbone), seed=seed
        )

    def _require_prediction(self, backbone: Backbone) -> None:
        """The mean of what is noised, and perhaps its variance behind it."""
        taken, given = backbone.input_spec.shape, backbone.output_spec.shape
        if given not in (taken, (2 * taken[0], *taken[1:])):
            raise DataError(
                f"backbone {backbone.name}",
                [f"it takes samples of {taken} and predicts {given}"],
                "A prediction has the sample's shape, or twice its channels (a learned sigma).",
            )

    def loss(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of a microbatch, in fp32.

        A prediction with twice the sample's channels has a learned sigma in its second half, which
        does not count (see predicted_mean).
        """
        mean = predicted_mean(prediction, self._num_channels)
        return self.process.loss(mean, batch["target"].to(mean.device))

    def iterators(
        self, args: argparse.Namespace, placement: Placement
    ) -> tuple[Iterator[dict[str, Tensor]], Iterator[dict[str, Tensor]]]:
        """(training, validation) microbatches of this rank, without end.

        Every evaluation reads the same validation samples, so its losses are comparable.
        """
        stages = placement.stages_of_device(parallel_state.get_pipeline_model_parallel_rank())
        num_samples = args.eval_iters * args.eval_global_batch_size

        def loader(split: Split) -> Iterator[dict[str, Tensor]]:
            training = split is Split.TRAIN
            dataset = self.train if training else self.validation
            sampler = MicrobatchSampler(
                len(dataset),
                consumed_samples=args.consumed_train_samples if training else 0,
                micro_batch_size=args.micro_batch_size if training else args.eval_micro_batch_size,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=parallel_state.get_data_parallel_world_size(),
                seed=self._seed,
                shuffle=training,
                period=None if training else num_samples or None,
            )
            return iter(
                DiffusionLoader(
                    dataset,
                    sampler,
                    self.process,
                    self._seed,
                    self._class_dropout,
                    self._null_label,
                    split,
                    needs_image=0 in stages or placement.num_stages - 1 in stages,
                )
            )

        return loader(Split.TRAIN), loader(Split.VALIDATION)
