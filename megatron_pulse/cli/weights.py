"""``pulse import`` and ``pulse export``: weights from and to the formats that others publish."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.errors import UserError, add_parser, check_folder, mending, require
from megatron_pulse.cli.megatron import prepare_megatron

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.backbone.chain import Backbone

_IMPORT = """\
Reads a diffusers folder (a whole pipeline's, or that of its unet or transformer) and writes a
checkpoint that launch/pretrain_diffusion.py continues from with --load DIR, at any parallel layout,
with a new optimizer; its moving average starts at the same weights. A single file (.pth,
.safetensors) is read as the state dict that U-ViT publishes and needs --backbone.
Every tensor must be there with its shape; what is wrong is listed, and nothing is written.

examples:
  pulse import --from stable-diffusion-v1-5 --to checkpoints/sd15
  pulse import --from PixArt-Sigma-XL-2-1024-MS/transformer --objective epsilon --to checkpoints/px
  pulse import --from imagenet256_uvit_huge.pth --backbone uvit-h --objective epsilon --to ckpt/uvit
"""

_EXPORT = """\
Writes the moving average of a checkpoint's weights (or, with --raw, the weights) in the format
that the model is published in: a folder that diffusers' from_pretrained loads, or for U-ViT a
file (.pth or .safetensors) with its published names. What importing read, exporting writes again
bit for bit.

examples:
  pulse export --load checkpoints/sd15 --to exported/unet
  pulse export --load runs/a --iteration 4000 --raw --dtype bfloat16 --to exported/transformer
  pulse export --load runs/uvit --to uvit.pth
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``import`` and ``export``."""
    parser = add_parser(commands, "import", "make a checkpoint of published weights", _IMPORT)
    add = parser.add_argument
    add("--from", dest="source", type=Path, required=True, metavar="PATH", help="what to read")
    add("--to", type=Path, required=True, metavar="DIR", help="for --load of training; new")
    add("--backbone", metavar="NAME", help="for a single file: the backbone that it holds")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --backbone: override one of its options (repeatable)",
    )
    add(
        "--objective",
        choices=["epsilon", "v", "flow"],
        help="what the model predicts (default: as the pipeline's scheduler says)",
    )
    parser.set_defaults(run=run_import, command="import")

    parser = add_parser(commands, "export", "write weights as they are published", _EXPORT)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="what training had as --save")
    add("--to", type=Path, required=True, metavar="PATH", help="the folder or file to write; new")
    add("--iteration", type=int, metavar="N", help="a checkpoint other than the latest")
    add("--raw", action="store_true", help="the weights as trained, not their moving average")
    add(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="of the written weights (default float32)",
    )
    parser.set_defaults(run=run_export, command="export")


def run_import(args: argparse.Namespace) -> None:
    """Read, compare, write."""
    require([*_check_new(args.to), *_check_source(args)])
    prepare_megatron()
    from megatron_pulse.backbone.published import PublishedError
    from megatron_pulse.integration.checkpoints import CheckpointError
    from megatron_pulse.integration.weights import import_weights

    with mending(PublishedError, CheckpointError, ValueError):
        read = _open_file if args.source.is_file() else _open_folder
        backbone, tensors, objective = read(args)
        import_weights(backbone, tensors, str(args.source), args.to, objective)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{args.to}: {backbone.name}, {len(tensors)} tensors with {count:,} values, objective "
        f"{objective}; continue with --load {args.to} --pulse-backbone {backbone.name} "
        f"--pulse-objective {objective}" + _option_flags(backbone)
    )


def run_export(args: argparse.Namespace) -> None:
    """Load, convert, write."""
    require(_check_new(args.to))
    prepare_megatron()
    import torch

    from megatron_pulse.diffusion.published import write_folder, write_state_dict
    from megatron_pulse.integration.checkpoints import CheckpointError
    from megatron_pulse.integration.weights import export_weights, load_whole

    with mending(CheckpointError):
        backbone, stage, _ = load_whole(args.load, args.iteration, averaged=not args.raw)
        published, tensors = export_weights(backbone, stage)
    dtype = getattr(torch, args.dtype)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    if published.library == "diffusers":
        write_folder(args.to, published, tensors)
    else:
        write_state_dict(args.to, tensors)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{args.to}: {published.class_name} of {published.library}, {len(tensors)} tensors with "
        f"{count:,} values, {args.dtype}, {'raw' if args.raw else 'averaged'} weights"
    )


def _open_folder(args: argparse.Namespace) -> tuple[Backbone, dict[str, Tensor], str]:
    from megatron_pulse.diffusion.published import (
        find_component,
        read_config,
        read_folder,
        read_objective,
    )
    from model_specs import load_published

    component = find_component(args.source)
    objective = args.objective or read_objective(component)
    if objective is None:
        raise UserError(
            f"{component} has no scheduler beside it that says what the model predicts: "
            "give --objective"
        )
    return load_published(read_config(component)), read_folder(component), objective


def _open_file(args: argparse.Namespace) -> tuple[Backbone, dict[str, Tensor], str]:
    from megatron_pulse.diffusion.published import read_state_dict
    from model_specs import load_backbone

    options = dict(text.split("=", 1) for text in args.option)
    return load_backbone(args.backbone, options), read_state_dict(args.source), args.objective


def _check_new(path: Path) -> list[str]:
    if path.is_dir() and any(path.iterdir()):
        return [f"--to {path} is a folder with something in it: name a new one"]
    if path.is_file():
        return [f"--to {path} exists: name a new one"]
    return check_folder(path.parent, "--to")


def _check_source(args: argparse.Namespace) -> list[str]:
    faults = [f"--option takes KEY=VALUE, not {o!r}" for o in args.option if "=" not in o]
    if args.source.is_file():
        if args.backbone is None:
            faults.append(f"--from {args.source} is a file: say with --backbone what it holds")
        if args.objective is None:
            faults.append(f"--from {args.source} is a file: say with --objective what it predicts")
    elif not args.source.is_dir():
        faults.append(f"--from {args.source}: there is no such file or folder")
    elif args.backbone is not None or args.option:
        faults.append("--backbone and --option are for single files; config.json says what it is")
    return faults


def _option_flags(backbone: Backbone) -> str:
    """The --pulse-option flags by which this backbone differs from the one of its name."""
    from model_specs import changed_options

    options = changed_options(backbone)
    return "".join(f" --pulse-option {key}={text}" for key, text in options.items())
