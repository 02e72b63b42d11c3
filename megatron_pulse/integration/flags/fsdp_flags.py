"""Flags of fully sharded data parallelism (FSDP2, HSDP)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from megatron_pulse.dataclass_flags import FROM_ONE, FROM_ZERO, flag, flag_name
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout, Gathering


def _needs_fsdp(name: str, default: object = None) -> Callable[[FsdpChoice], str | None]:
    def check(choice: FsdpChoice) -> str | None:
        given = getattr(choice, name) != default
        return "is for --use-torch-fsdp2" if given and not choice.fsdp else None

    return check


@dataclass(frozen=True)
class FsdpChoice:
    """Flags of a layout without a pipeline, whose parameters are sharded over all replicas and the
    ranks that share their tokens."""

    fsdp: bool = flag("the same as --use-torch-fsdp2", False)
    fsdp_group: int | None = flag(
        "ranks that share the weights (default all)",
        metavar="N",
        within=FROM_ONE,
        check=_needs_fsdp("fsdp_group"),
    )
    fsdp_layers: int = flag(
        "layers gathered together (default 1)",
        1,
        metavar="N",
        within=FROM_ONE,
        check=_needs_fsdp("fsdp_layers", 1),
    )
    fsdp_gather: Literal["pass", "microbatch", "step"] = flag(
        "how often (default: in each pass)",
        "pass",
        check=_needs_fsdp("fsdp_gather", "pass"),
    )
    fsdp_reduce: Literal["microbatch", "step"] = flag(
        "how often (default: each microbatch)",
        "microbatch",
        check=_needs_fsdp("fsdp_reduce", "microbatch"),
    )
    fsdp_prefetch: int = flag(
        "units gathered ahead (default 1)",
        1,
        metavar="N",
        within=FROM_ZERO,
        check=_needs_fsdp("fsdp_prefetch", 1),
    )

    @classmethod
    def of(cls, layout: FsdpLayout | None) -> FsdpChoice:
        """Flags of a planned layout, apart from its units and their collectives."""
        return cls() if layout is None else cls(fsdp=True, fsdp_group=layout.group)

    def layout(self, num_layers: int, replicas: int) -> FsdpLayout | None:
        """Layout of a chain of ``num_layers`` on ``replicas`` data- and context-parallel ranks."""
        if not self.fsdp:
            return None
        return FsdpLayout.of_size(
            num_layers,
            self.fsdp_layers,
            group=self.fsdp_group or replicas,
            gathering=Gathering[self.fsdp_gather.upper()],
            reduce_once=self.fsdp_reduce == "step",
            prefetch=self.fsdp_prefetch,
        )


def take_megatron_flags(args: argparse.Namespace) -> None:
    """Replace Megatron's flags of FSDP2 by the flags here, which its own loop does not read.

    Optimizer states are sharded, and saved, as with --use-distributed-optimizer.
    """
    if args.use_torch_fsdp2:
        args.pulse_fsdp, args.use_torch_fsdp2 = True, False
    if args.pulse_fsdp:
        args.use_distributed_optimizer = True


FSDP_FLAGS = (
    "--use-torch-fsdp2",
    *(flag_name(f"pulse_{each.name}") for each in fields(FsdpChoice)),
)
"""Flags of which a plan decides all."""

_EXCLUDED = {
    "fp16": "has no loss scale there: use --bf16",
    "optimizer_cpu_offload": "moves the optimizer state of other layouts",
    "overlap_grad_reduce": "has no effect: gradients are reduced in backward",
    "overlap_param_gather": "has no effect: --pulse-fsdp-prefetch overlaps gathers",
    "grad_reduce_in_bf16": "has no effect: gradients are reduced in fp32",
    "pulse_sdc_check_interval": "compares layers of whole weights",
    "pulse_placement": "places pipeline stages",
    "pulse_num_chunks": "is for pipeline stages",
    "pulse_activation_cap": "is for pipeline stages",
    "pulse_offload": "offloads activations of pipeline stages: recompute instead",
    "pulse_offload_weights": "keeps whole frozen weights on the host",
    "check_weight_hash_across_dp_replicas_interval": "compares whole weights",
}
"""Flags that exclude FSDP, and why."""


def excluding(args: argparse.Namespace) -> list[str]:
    """Attributes of the flags given that exclude FSDP."""
    return [name for name in _EXCLUDED if getattr(args, name, None)]


def fsdp_faults(args: argparse.Namespace, choice: FsdpChoice) -> Iterator[str]:
    """Faults of flags and layouts beside fully sharded data parallelism."""
    if not choice.fsdp:
        return
    for name in excluding(args):
        yield f"{flag_name(name)} cannot be used with --use-torch-fsdp2: it {_EXCLUDED[name]}"
    if args.pulse_schedule not in (None, "auto"):
        yield "--pulse-schedule cannot be used with --use-torch-fsdp2: it orders pipeline stages"
    if args.optimizer not in ("adam", "sgd"):
        yield (
            f"--optimizer {args.optimizer} cannot be used with --use-torch-fsdp2, which gives "
            "ranks a part of each matrix: use adam or sgd"
        )
    if args.pipeline_model_parallel_size != 1:
        yield (
            "--use-torch-fsdp2 is a layout without a pipeline: leave "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} out"
        )
        return
    replicas = args.world_size // args.tensor_model_parallel_size
    if replicas < 2:
        yield (
            "--use-torch-fsdp2 needs 2 or more ranks that share the weights, data- or "
            "context-parallel: leave it out on one"
        )
    group = choice.fsdp_group or replicas
    if group < 2 or replicas % group:
        yield (
            f"--pulse-fsdp-group {group} must divide the {replicas} data- and context-parallel "
            "ranks, from 2"
        )
    elif group < replicas and args.tensor_model_parallel_size > 1:
        yield (
            f"--pulse-fsdp-group {group} of {replicas} ranks (HSDP) cannot be used with "
            "--tensor-model-parallel-size: share the weights over all ranks"
        )
