"""``pulse backbones``: the named backbones and how far each can be folded."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from megatron_pulse.cli.errors import add_parser, mending, require
from megatron_pulse.cli.megatron import prepare_megatron

_DESCRIPTION = """\
The largest P is the most pipeline devices over which a backbone folds with both ends of
every skip on one device; beyond it, use --pulse-placement sequential or interleaved.
The input is one sample: channels x height x width.

examples:
  pulse backbones
  pulse backbones uvit-s sd-v1.5 --json
"""


@dataclass(frozen=True)
class BackboneRow:
    """One row of the table; ``reads`` is what comes with each sample, besides the sample."""

    name: str
    num_parameters: int
    num_layers: int
    num_skips: int
    largest_fold: int
    input_shape: tuple[int, ...]
    reads: tuple[str, ...]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``backbones``."""
    parser = add_parser(commands, "backbones", "list the named backbones", _DESCRIPTION)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, command="backbones")


def run(args: argparse.Namespace) -> None:
    """Print the table."""
    from model_specs import available, unknown_backbone, unusable_families

    names = args.names or list(available())
    faults = [fault for name in names if (fault := unknown_backbone(name))]
    require(faults)
    for fault in unusable_families():
        print(fault, file=sys.stderr)
    prepare_megatron()
    from tqdm import tqdm

    rows = [_row(name) for name in tqdm(names, desc="counting", delay=2, leave=False, disable=None)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    width = max(len(row.name) for row in rows) + 1
    print(
        f"{'backbone':{width}s}{'parameters':>12s}{'layers':>8s}{'skips':>7s}{'largest P':>11s}"
        "  input, and what comes with it"
    )
    for row in rows:
        shape = "x".join(map(str, row.input_shape))
        print(
            f"{row.name:{width}s}{row.num_parameters / 1e6:>10.1f} M{row.num_layers:>8d}"
            f"{row.num_skips:>7d}{row.largest_fold:>11d}  {shape}, {', '.join(row.reads)}"
        )


def _row(name: str) -> BackboneRow:
    from megatron_pulse.planner.partition.find import largest_fold
    from megatron_pulse.profile.parameters import count_parameters
    from model_specs import load_backbone

    with mending(ValueError):
        backbone = load_backbone(name)
        num_parameters = sum(count_parameters(backbone))
    return BackboneRow(
        name,
        num_parameters,
        len(backbone.layers),
        len(backbone.skips),
        largest_fold(len(backbone.layers), backbone.skips),
        backbone.input_spec.shape,
        tuple(backbone.batch_fields),
    )
