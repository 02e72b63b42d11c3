"""``pulse profile``: costs of each layer of a backbone on a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.backbone.build_context import LOCAL, TRANSFORMER_IMPLS
from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.cli.backbone_flags import (
    add_layers_flags,
    add_shares,
    layers_faults,
    options_of,
    trained_backbone,
)
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.import_megatron import prepare_megatron, prepare_profiling
from megatron_pulse.cli.models.encoder_flags import encoder_folder_faults
from megatron_pulse.cli.output import table
from megatron_pulse.cli.shared_flags import number_list_faults, numbers
from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ONE, TO_4096, TO_MILLION, flag_name
from megatron_pulse.errors import naming, unknown_name
from megatron_pulse.profile.roofline import ELEMENT_BYTES, PRESETS, Roofline, custom_device
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.backbone.costs import ChainCosts
    from megatron_pulse.profile.profile import Profile

_DESCRIPTION = """\
Planning balances devices by these costs. They come from

  measured   each layer runs alone on this machine's GPU or CPU: forward and backward, whole, split
             into input and weight gradient, and with selective recomputation. On a CPU it has the
             threads of a rank (--threads). Convolutions run in the faster memory format, unless
             --option channels_last=true or false sets it; planned runs use the same
  analytic   operations and bytes of each layer on a device named by --preset or given in figures;
             ratios are good, seconds are estimates
  table      the same, from a published table of layers

Costs at other microbatch sizes are interpolated: give the smallest and the largest that you may
train with.

examples:
  pulse profile --backbone uvit-tiny -o profile.json
  pulse profile --backbone sdxl --dtype bfloat16 --micro-batch-size 1,2,4,8 -o profile.json
  pulse profile --backbone flux-dev --preset H100 -o profile.json
  pulse profile --backbone sd-v2.1 --option sample_size=64 --peak-tflops 165 \\
      --bandwidth-gbs 1008 --memory-gb 24 -o rtx4090.json
  pulse profile --from-table sdxl_1024_fine.json --preset V100-32GB -o profile.json
  pulse profile --backbone sd-v1.5 --encoders sd-v1.5 -o encoders.json

With --encoders the forwards of the pipeline's text encoders and autoencoder are profiled instead,
one sample at a time, for 'pulse tune --encoders'.
"""
_FIGURES = ("peak_tflops", "bandwidth_gbs", "memory_gb")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``profile``."""

    parser = add_parser(
        commands, "profile", "measure or estimate the costs of each layer", _DESCRIPTION, run
    )
    add = partial(add_flag, parser)
    add_layers_flags(parser, "--from-table", "a table of layers, as JSON")
    add_shares(parser)
    add(
        "--micro-batch-size N[,N...]",
        "microbatch sizes to profile (default 1,2,4)",
        default="1,2,4",
    )
    add(
        "--device",
        "default: analytic with --preset or figures, else cuda if there is one, else cpu",
        choices=["cuda", "cpu", "analytic"],
    )
    add(
        "--encoders DIR",
        "profile the encoders of this diffusers pipeline folder, as the backbone reads them",
        type=Path,
    )
    add(
        "--components NAME[,NAME...]",
        "only these of --encoders, by folder name (default: all that are read)",
    )
    add("--preset NAME", f"a device for analytic costs: {', '.join(PRESETS)}")
    add("--peak-tflops X", "peak of a device without a preset", within=ABOVE_ZERO, type=float)
    add("--bandwidth-gbs X", "its memory bandwidth in GB/s", within=ABOVE_ZERO, type=float)
    add("--memory-gb X", "its memory in GB", within=ABOVE_ZERO, type=float)
    add(
        "--efficiency X",
        "analytic: share of the peak that matrix products reach (default 0.5)",
        within=ABOVE_ZERO,
        type=float,
    )
    add(
        "--dtype",
        "of parameters and activations (default: bfloat16 on GPUs that have it, else float16; "
        "float32 on a CPU)",
        choices=list(ELEMENT_BYTES),
    )
    add(
        "--transformer-impl",
        "measured: implementation of layers in the run (default local)",
        choices=TRANSFORMER_IMPLS,
        default=LOCAL,
    )
    add(
        "--token-slices N[,N...]",
        "also the costs with MLPs, norms and projections in N slices of the tokens, which 'pulse "
        "tune' chooses where memory is short (--pulse-token-slices)",
    )
    add("--recompute", "for plans that recompute activations: a backward includes a forward")
    add(
        "--context-parallel",
        "also costs of context parallelism: what ranks that share the tokens divide and exchange",
    )
    add("--once-per-kind", "measure layers of equal operators and shapes once")
    add(
        "--seconds-per-layer S",
        "measured: most seconds for a layer at one size (default 10)",
        within=ABOVE_ZERO,
        type=float,
    )
    add(
        "--threads N",
        "measured on a CPU: threads of a rank (default: OMP_NUM_THREADS, or 1, as in 'pulse run')",
        within=TO_4096,
        type=int,
    )
    add("--top N", "layers to list (default 12)", within=FROM_ONE, default=12)
    add("-o, --output JSON", "the profile to write", writes=[".json"], required=True)


def run(args: argparse.Namespace) -> None:
    """Find the costs, write them, list the largest."""
    faults = number_list_faults(args, "micro_batch_size", "token_slices")
    sizes = () if faults else numbers(args.micro_batch_size) or ()
    faults += TO_MILLION.faults("--micro-batch-size", max(sizes, default=None))
    faults += [*command_faults(args), *layers_faults(args, is_file=args.from_table is not None)]
    if args.shares is not None and (args.from_table or args.encoders):
        faults.append("--shares is for the shapes of a backbone's layers")
    if args.token_slices is not None and (args.from_table or args.encoders):
        faults.append("--token-slices is for a backbone's layers")
    elif not faults and 1 in (numbers(args.token_slices) or ()):
        faults.append("--token-slices 1 is a whole layer, which is always profiled: give 2 or more")
    faults += _device_faults(args)
    if args.encoders is not None:
        faults += _encoder_faults(args)
    elif args.components is not None:
        faults.append("--components is for --encoders")
    if args.context_parallel and (args.from_table or args.encoders):
        faults.append("--context-parallel is for a backbone's layers")
    require(faults)
    if args.encoders is not None:
        _profile_encoders(args)
        return
    from megatron_pulse.profile.files import save_profile
    from megatron_pulse.profile.warnings import spread_caution

    with as_user_error(ValueError):
        make = _from_table if args.from_table else _from_backbone
        profile = make(args, sizes)
    save_profile(profile, args.output)
    warn(spread_caution(profile))
    print("\n".join([*report(profile, sizes[-1], args.top), f"written to {args.output}"]))


def report(profile: Profile, size: int, top: int) -> list[str]:
    """Lines on the costs' origin, the ``top`` layers by time at microbatch ``size``, and totals."""
    from megatron_pulse.profile.profile import Source

    name = name_of(profile.backbone)
    versions = "".join(f", {key} {value}" for key, value in profile.versions.items())
    sizes = ", ".join(map(str, profile.micro_batch_sizes))
    costs = profile.at(size)
    times = profile.times_at(size)
    totals = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    order = sorted(range(len(totals)), key=lambda i: -totals[i])[:top]
    measured = profile.source is Source.MEASURED
    spread = ["spread"] * measured
    titles = ["layer", "share", "forward", "input grad", "weight grad", *spread]
    rows = [[*titles, "saved", "peak", "parameters"]]
    whole = sum(totals) or 1.0
    for i in order:
        layer = times[i]
        rows.append(
            [
                costs.names[i],
                f"{totals[i] / whole:.1%}",
                f"{1e3 * layer.forward_s:.3f}",
                f"{1e3 * layer.input_grad_s:.3f}",
                f"{1e3 * layer.weight_grad_s:.3f}",
                *[f"{layer.spread:.0%}"] * measured,
                f"{costs.saved_bytes[i] / 1e6:.1f}",
                f"{layer.peak_bytes / 1e6:.1f}",
                f"{costs.parameters[i]:,d}",
            ]
        )
    lines = [
        f"{name}: {profile.source} on {profile.device}, {profile.dtype}{versions}",
        profile.method,
        f"profiled at microbatch size {sizes}; at {size}, in ms and MB"
        + (", backward with recomputation:" if profile.recompute else ":"),
        "",
        *table(rows, left=(0,)),
    ]
    if len(order) < len(totals):
        lines.append(f"... and {len(totals) - len(order)} layers more")
    forward, backward = sum(costs.forward_s), sum(costs.backward_s)
    return [
        *lines,
        "",
        f"{len(totals)} layers, {sum(costs.parameters):,} parameters: forward {1e3 * forward:.2f} "
        f"ms, backward {1e3 * backward:.2f} ms (x{backward / forward if forward else 0:.2f}), "
        f"{sum(costs.saved_bytes) / 1e6:,.1f} MB saved, {len(costs.skips)} skips of "
        f"{sum(skip.num_bytes for skip in costs.skips) / 1e6:,.1f} MB",
        *([profile.quantized] if profile.quantized else []),
        *_context(profile),
        *_sliced(profile),
        *_selective(costs, profile.at(size, profile.all_layers(ActivationPolicy.SELECTIVE))),
    ]


def _context(profile: Profile) -> list[str]:
    """Line on what context parallelism divides, if it is known."""
    if (costs := profile.context) is None:
        return []
    times = profile.times_at(profile.micro_batch_sizes[-1])
    whole = sum(row.whole_s for row in times) or 1.0
    part = sum(c.time.of(2) * row.whole_s for c, row in zip(costs.layers, times, strict=True))
    heads = f"heads {', '.join(map(str, costs.heads))}"
    ring = sum(layer.ring_bytes for layer in costs.layers)
    rings = f" ({ring / 1e6:,.1f} MB by rings where ranks do not divide heads)" * bool(ring)
    sent = sum(layer.all_to_all_bytes for layer in costs.layers)
    gathered = sum(layer.gathered_bytes for layer in costs.layers)
    return [
        f"context parallelism over ranks that divide {heads}: one of two takes {part / whole:.1%} "
        f"of the time, and they exchange {sent / 1e6:,.1f} MB of a sample by all-to-alls{rings} "
        f"and {gathered / 1e6:,.1f} MB by gathers in a forward"
    ]


def _sliced(profile: Profile) -> list[str]:
    """Lines on the effect of slices of tokens, if it is known."""
    size, lines = profile.micro_batch_sizes[-1], []
    for count in sorted(profile.sliced):
        pairs = list(
            zip(profile.times_at(size), profile.in_slices(count).times_at(size), strict=True)
        )
        whole, parts = zip(*pairs, strict=True)
        peaks = [max(row.peak_bytes for row in rows) / 1e6 for rows in (whole, parts)]
        longer = sum(row.whole_s for row in parts) / (sum(row.whole_s for row in whole) or 1) - 1
        num_sliced = sum((a.saved_bytes, a.peak_bytes) != (b.saved_bytes, b.peak_bytes)
                         for a, b in pairs)  # fmt: skip
        lines.append(
            f"with --pulse-token-slices {count} a layer takes at most {peaks[1]:,.1f} instead of "
            f"{peaks[0]:,.1f} MB, and all layers {longer:+.1%} of the time; {num_sliced} of "
            f"{len(pairs)} layers have parts in slices, the others stay whole"
        )
    return lines


def _selective(costs: ChainCosts, part: ChainCosts) -> list[str]:
    """Line on the effect of selective recomputation, if it is known and saves memory."""
    kept, saved = sum(part.saved_bytes), sum(costs.saved_bytes)
    more_s = sum(part.backward_s) - sum(costs.backward_s)
    if kept >= saved:
        return []
    return [
        f"with --recompute-granularity selective {kept / 1e6:,.1f} MB of these are kept, and the "
        f"backward takes {1e3 * more_s:.2f} ms longer"
    ]


def _encoder_faults(args: argparse.Namespace) -> list[str]:
    faults = encoder_folder_faults(args.encoders)
    for name in _components(args) or ():
        if not (args.encoders / name).is_dir():
            faults.append(f"--components: {args.encoders} has no folder {name[:60]!r}")
    if args.from_table:
        faults.append("--encoders: name the --backbone or --module that reads their results")
    if args.recompute or args.once_per_kind or args.transformer_impl != "local":
        faults.append(
            "--recompute, --once-per-kind and --transformer-impl are for a backbone's layers"
        )
    return faults


def _profile_encoders(args: argparse.Namespace) -> None:
    from megatron_pulse.cli.measure.encoder_costs import run_encoders

    analytic = args.preset or args.peak_tflops is not None
    prepare_megatron()
    roofline = _roofline(args) if analytic else None
    with as_user_error(ValueError):
        backbone = trained_backbone(args, roofline.dtype if roofline else args.dtype or "float32")
    run_encoders(args, backbone, roofline, _components(args))


def _components(args: argparse.Namespace) -> list[str] | None:
    return None if args.components is None else args.components.split(",")


def _device_faults(args: argparse.Namespace) -> list[str]:
    """Faults of the flags that name a device for these costs."""

    faults = []
    given = [name for name in _FIGURES if getattr(args, name) is not None]
    flags = ", ".join(map(flag_name, _FIGURES))
    analytic = args.from_table or args.device == "analytic" or (args.device is None and
                                                                (args.preset or given))  # fmt: skip
    if args.preset and args.preset not in PRESETS:
        faults.append(unknown_name("preset", args.preset, PRESETS))
    elif args.preset:
        faults += PRESETS[args.preset].dtype_faults("--dtype", args.dtype)
    if args.preset and given:
        faults.append(f"give either --preset or {flags}")
    if 0 < len(given) < len(_FIGURES):
        faults.append(f"a device in figures needs all of {flags}")
    if args.efficiency is not None and args.efficiency > 1:
        faults.append(f"--efficiency is {args.efficiency}; it is a share of the peak, at most 1")
    if args.from_table and args.device not in (None, "analytic"):
        faults.append(f"--device {args.device} measures layers, and a table has none to run")
    if analytic:
        if not (args.preset or given):
            faults.append(f"name a device: --preset ({', '.join(PRESETS)}) or {flags}")
        if args.once_per_kind or args.seconds_per_layer is not None or args.threads is not None:
            faults.append(
                "--once-per-kind, --seconds-per-layer and --threads: only for measured profiles"
            )
        if args.transformer_impl != "local":
            faults.append(f"--transformer-impl {args.transformer_impl}: only for measured profiles")
    else:
        if args.preset or given:
            faults.append(f"--preset and {flags} are for --device analytic, or for a table")
        if args.efficiency is not None:
            faults.append("--efficiency is for --device analytic, or for a table")
    return faults


def _roofline(args: argparse.Namespace) -> Roofline:

    if args.preset:
        device = PRESETS[args.preset]
    else:
        device = custom_device(*(getattr(args, name) for name in _FIGURES))
    dtype = args.dtype or device.half_dtype
    if args.efficiency is None:
        return Roofline(device, dtype)
    return Roofline(device, dtype, args.efficiency)


def _from_table(args: argparse.Namespace, sizes: Sequence[int]) -> Profile:
    from megatron_pulse.profile.profile_from_table import read_table

    return read_table(args.from_table, _roofline(args), sizes, args.recompute)


def _from_backbone(args: argparse.Namespace, sizes: Sequence[int]) -> Profile:
    roofline = _roofline(args) if args.preset or args.peak_tflops is not None else None
    prepare_profiling()
    if roofline is not None:
        from megatron_pulse.profile.analytic import analyse, analyse_context
        from megatron_pulse.runtime.measure.execution_modes import RUNNING

        backbone = trained_backbone(args, roofline.dtype)
        slices = _token_slices(args, backbone)
        profile = analyse(backbone, sizes, roofline, args.recompute, True, RUNNING, slices)
        if args.context_parallel:
            profile = analyse_context(profile, backbone, roofline, RUNNING)
        return profile
    import torch

    from megatron_pulse.integration.planning.memory_format import measured_format
    from megatron_pulse.profile.measurement.clock import RepetitionLimits
    from megatron_pulse.profile.measurement.context_rank import with_context_costs
    from megatron_pulse.profile.measurement.measure import measure
    from megatron_pulse.profile.warnings import rank_threads
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    present, limit_s = torch.cuda.is_available(), args.seconds_per_layer
    device = args.device or ("cuda" if present else "cpu")
    if device == "cuda" and not present:
        require(["--device cuda: torch finds no GPU here; use --device cpu, or --preset NAME"])
    if device == "cuda" and args.threads is not None:
        require(["--threads is for --device cpu"])
    dtype = args.dtype or _dtype_of(device)
    patience = RepetitionLimits() if limit_s is None else RepetitionLimits(limit_s=limit_s)
    threads = (args.threads or rank_threads()) if device == "cpu" else None
    given, implementation = options_of(args), args.transformer_impl
    with ProgressLine("choosing the memory format"):
        backbone, times = measured_format(
            trained_backbone(args, dtype), given, sizes[-1], device, dtype, threads, implementation
        )

    def measured(layers: Backbone, sizes: Sequence[int], context: int = 1) -> Profile:
        return measure(
            layers,
            sizes,
            device,
            dtype,
            args.recompute,
            patience,
            args.once_per_kind or context > 1,
            progress=True,
            threads=threads,
            running=RUNNING,
            transformer_impl=implementation,
            token_slices=slices,
            context=context,
        )

    slices = _token_slices(args, backbone)
    profile = measured(backbone, sizes)
    if args.context_parallel:
        profile = with_context_costs(
            profile, backbone, lambda part, size: measured(part, sizes[-1:], size)
        )
    return profile if times is None else replace(profile, method=f"{profile.method}; {times}")


def _token_slices(args: argparse.Namespace, backbone: Backbone) -> Sequence[int]:
    """Numbers of ``--token-slices``; raises Faults if the backbone cannot be sliced."""
    counts = numbers(args.token_slices) or ()
    if not counts:
        return ()
    from megatron_pulse.profile.token_slices import require_token_slices

    if backbone.num_shapes > 1:
        require(["--token-slices: profile one shape, without buckets"])
    with naming("--token-slices"):
        require_token_slices(backbone, max(counts))
    return counts


def _dtype_of(device: str) -> str:
    import torch

    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
