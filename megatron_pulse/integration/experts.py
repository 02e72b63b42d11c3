"""Two experts, each for its range of times, as Wan 2.2 A14B has: training and sampling.

diffusers' ``transformer`` denoises at times from ``boundary_ratio`` on, ``transformer_2`` below.
Both are trained in one run as the two chains of a cascade, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_pulse.errors import Faults, collecting, format_faults, naming
from megatron_pulse.runtime.tensor_settings import compute_device

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.diffusion.objectives import DiffusionProcess
    from megatron_pulse.diffusion.sampling import Fields
    from megatron_pulse.integration.sampling import TrainedModel

BOUNDARY = "--pulse-boundary-ratio"


def processes_of_experts(
    process: DiffusionProcess, backbone: Backbone, boundary: float
) -> dict[str, DiffusionProcess]:
    """Process of each chain of a cascade of two experts, of which the first has later times.

    Raises Faults if the chains are no experts of one model, or ``process`` has other times.
    """
    faults, named = list[str](), f"{BOUNDARY} {boundary:g}"
    found = process, process
    if 0 < boundary <= 1:  # others are faults of the flag
        with collecting(faults, (ValueError,)), naming(named):
            found = process.experts(boundary)
    parts = list(backbone.parts.items())
    if len(parts) != 2:
        faults.append(f"{named}: two experts are two chains, and {backbone.name} has {len(parts)}")
    else:
        (high, one), (low, other) = parts
        unlike = list(_unlike(one, other))
        if one.record["family"] != other.record["family"]:
            unlike = [f"they are {one.name} and {other.name}"]
        faults += [
            f"{named}: {high} and {low} must be experts of one model: {fault}" for fault in unlike
        ]
    if faults:
        raise Faults(faults)
    return dict(zip(backbone.parts, found, strict=True))


def _unlike(high: Backbone, low: Backbone) -> Iterator[str]:
    if high.sample_spec != low.sample_spec:
        yield f"samples are {high.sample_spec} and {low.sample_spec}"
    if high.batch_fields != low.batch_fields:
        read = ", ".join(sorted(high.batch_fields)), ", ".join(sorted(low.batch_fields))
        yield f"they read {read[0]} and {read[1]}, or of other shapes"


def with_low_noise(
    high: TrainedModel, low: TrainedModel, boundary_ratio: float | None = None
) -> tuple[TrainedModel, float]:
    """Model that predicts with ``low`` at times below a boundary, and the boundary's timestep.

    The boundary is a share of the process; None is where both ranges of training meet. Only the
    expert in use is on the compute device, the other one on the host. Raises ValueError for experts
    that do not fit together.
    """
    boundary = high.process.min_time if boundary_ratio is None else boundary_ratio
    if faults := _faults(high, low, boundary, boundary_ratio is None):
        raise ValueError(format_faults(f"experts {high.folder} and {low.folder}", faults))
    timestep, experts = boundary * high.process.num_timesteps, (low, high)
    used: list[TrainedModel] = []

    def predict(
        noisy: Tensor, timesteps: Tensor, conditioning: Fields, batch_size: int | None = None
    ) -> Tensor:
        chosen = experts[float(timesteps[0]) >= timestep]
        if used != [chosen]:
            for other in experts:
                if other is not chosen:
                    other.move(torch.device("cpu"))
            chosen.move(compute_device())
            used[:] = [chosen]
        return chosen.predict(noisy, timesteps, conditioning, batch_size)

    return replace(high, predict=predict), timestep


def _faults(
    high: TrainedModel, low: TrainedModel, boundary: float, is_of_training: bool
) -> list[str]:
    faults = [f"diffusion process: {each}" for each in high.process.differences(low.process)]
    faults += _unlike(high.backbone, low.backbone)
    ranges = [(each.process.min_time, each.process.max_time) for each in (low, high)]
    if not 0 < boundary < 1:
        faults.append("no boundary between them is known: give --boundary-ratio (Wan 2.2: 0.875)")
    elif ranges[1][1] <= boundary or ranges[0][0] >= boundary:
        faults.append(
            f"times from {boundary:g} on are for an expert trained from {ranges[1][0]:g} to "
            f"{ranges[1][1]:g}, others for one trained from {ranges[0][0]:g} to {ranges[0][1]:g}: "
            "exchange --load and --low-noise"
        )
    elif is_of_training and low.process.max_time != boundary:
        faults.append(
            f"they were trained at times from {boundary:g} on and below "
            f"{low.process.max_time:g}: give --boundary-ratio"
        )
    return faults
