"""``pulse backbones``: the named backbones, and the largest fold of each."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass

from megatron_pulse.cli.flag_checks import add_flag, add_parser, as_user_error, require
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.output import add_json, print_result, table
from megatron_pulse.progress import track

_DESCRIPTION = """\
The largest P is the most devices of a fold with all skips collocated. With more, use
--pulse-placement sequential or interleaved. The input is one sample: channels x height x width.

examples:
  pulse backbones
  pulse backbones uvit-s sd-v1.5 --json
"""


@dataclass(frozen=True)
class BackboneRow:
    """Row of the table; ``reads`` are the batch fields beside the sample."""

    name: str
    num_parameters: int
    num_layers: int
    num_skips: int
    largest_fold: int
    input_shape: tuple[int, ...]
    reads: tuple[str, ...]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``backbones``."""
    parser = add_parser(commands, "backbones", "list the named backbones", _DESCRIPTION, run)
    add_flag(parser, "names NAME", "only these (default: all)", nargs="*")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Print the table."""
    from model_specs import available, unknown_backbone, unusable_families

    names = args.names or list(available())
    faults = [fault for name in names if (fault := unknown_backbone(name))]
    require(faults)
    for fault in unusable_families():
        print(fault, file=sys.stderr)
    prepare_megatron()
    rows = [_row(name) for name in track(names, "counting", "backbones")]
    cells = [
        (
            row.name,
            f"{row.num_parameters / 1e6:.1f} M",
            str(row.num_layers),
            str(row.num_skips),
            str(row.largest_fold),
            f"{'x'.join(map(str, row.input_shape))}, {', '.join(row.reads)}",
        )
        for row in rows
    ]
    print_result(
        args, table([_TITLES, *cells], left=(0, -1)), lambda: [asdict(row) for row in rows]
    )


_TITLES = (
    *("backbone", "parameters", "layers", "skips", "largest P"),
    "input, and what comes with it",
)


def _row(name: str) -> BackboneRow:
    from megatron_pulse.planner.partition.legal_cuts import largest_fold
    from megatron_pulse.profile.parameters import count_parameters
    from model_specs import load_backbone

    with as_user_error(ValueError):
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
