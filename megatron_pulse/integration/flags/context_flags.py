"""Flags beside context parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from megatron_pulse.integration.flags.pulse_options import PulseOptions
from model_specs import is_cascade


def context_rank(args: argparse.Namespace) -> int:
    """Rank within the context-parallel group, in Megatron's order of groups."""
    return int(args.rank // args.tensor_model_parallel_size % args.context_parallel_size)


def context_faults(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    """Faults of flags beside ``--context-parallel-size`` or its search."""
    size = args.context_parallel_size
    beside = f"--context-parallel-size {size}" if size > 1 else "--pulse-auto-context"
    if options.auto_context and not options.auto:
        yield "--pulse-auto-context was given without --pulse-auto"
    if size < 2 and not options.auto_context:
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
        "--pulse-adapter-dropout": (
            bool(options.adapter.adapter_dropout),
            "draws a mask for whole sequences: give 0",
        ),
    }
    yield from excluded_faults(excluded, beside)
    if is_cascade(options.backbone or ""):
        yield f"{beside}: the chains of a cascade are not divided"


def excluded_faults(excluded: Mapping[str, tuple[bool, str]], beside: str) -> Iterator[str]:
    """Yield the flags of ``excluded`` that are given ``beside`` a flag, with the reasons."""
    for flag, (is_given, why) in excluded.items():
        if is_given:
            yield f"{flag} cannot be used with {beside}: it {why}"
