"""Flags beside context parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_pulse.integration.flags.pulse_options import PulseOptions
from model_specs import is_cascade


def context_rank(args: argparse.Namespace) -> int:
    """Rank within the context-parallel group, in Megatron's order of groups."""
    return int(args.rank // args.tensor_model_parallel_size % args.context_parallel_size)


def context_faults(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    """Faults of flags beside ``--context-parallel-size``."""
    size = args.context_parallel_size
    if size < 2:
        return
    excluded = {
        "--use-tp-pp-dp-mapping": (
            args.use_tp_pp_dp_mapping,
            "makes groups of experts in Megatron, without context parallelism",
        ),
        "--pulse-sdc-check-interval": (
            bool(options.sdc_check_interval),
            "recomputes a layer on one rank, without those that share its tokens",
        ),
        "--pulse-token-slices": (
            options.token_slices > 1,
            "slices the tokens of one rank: give one of them",
        ),
        "--pulse-adapter-dropout": (
            bool(options.adapter.adapter_dropout),
            "draws a mask for whole sequences: give 0",
        ),
    }
    for flag, (is_given, why) in excluded.items():
        if is_given:
            yield f"{flag} cannot be used with --context-parallel-size {size}: it {why}"
    if is_cascade(options.backbone or ""):
        yield f"--context-parallel-size {size}: the chains of a cascade are not divided"
