"""The data of a run: its diffusion process, its datasets, and each rank's microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from megatron.core import parallel_state
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.objectives import (
    DiffusionProcess,
    NoiseSchedule,
    Objective,
    TimestepDensity,
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


class DiffusionData:
    """Opens ``--pulse-data`` for ``backbone``; raises DataError if they do not fit."""

    def __init__(self, options: PulseOptions, backbone: Backbone, seed: int) -> None:
        self.process = make_process(options)
        self._seed = seed
        self._class_dropout = options.class_dropout
        self._has_labels = "labels" in backbone.batch_fields
        self._null_label = int(backbone.record["options"].get("num_classes", 0))
        channels, height, _ = backbone.input_spec.shape
        self.train, self.validation = open_dataset(
            options.data,
            image_size=None if options.data.startswith("latents:") else height,
            channels=channels,
            expected_shape=backbone.input_spec.shape,
            seed=seed,
        )
        self._require_conditioning(options.data, backbone)

    def _require_conditioning(self, name: str, backbone: Backbone) -> None:
        faults = []
        if self._has_labels and self.train.num_classes > self._null_label:
            faults.append(
                f"it has {self.train.num_classes} classes, the backbone {self._null_label}: "
                f"use --pulse-option num_classes={self.train.num_classes}"
            )
        if "context" in backbone.batch_fields:
            wanted = backbone.batch_fields["context"].shape
            if self.train.context_shape != wanted:
                faults.append(
                    f"the backbone reads text states of shape {wanted}, the data has "
                    f"{self.train.context_shape or 'none'}"
                )
        if faults:
            raise DataError(f"dataset {name}", faults, "Change the data or the backbone.")

    def loss(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of a microbatch, in fp32."""
        return self.process.loss(prediction, batch["target"].to(prediction.device))

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
                    self._class_dropout if self._has_labels else 0.0,
                    self._null_label if self._has_labels else None,
                    split,
                    needs_image=0 in stages or placement.num_stages - 1 in stages,
                )
            )

        return loader(Split.TRAIN), loader(Split.VALIDATION)
