"""``pulse clusters``: the named clusters, and the file of one as a starting point."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import add_flag, add_parser
from megatron_pulse.cli.output import add_json, print_result, table

if TYPE_CHECKING:
    from megatron_pulse.planner.cluster.cluster import Cluster

_DESCRIPTION = """\
Lists the named clusters, or prints one as YAML. Edit that file and give it wherever a cluster is
named. 'pulse probe' measures one instead. NAME:4 is NAME with 4 nodes.

examples:
  pulse clusters
  pulse clusters dgx-a100:4
  pulse clusters dgx-h100 > ours.yaml
  pulse clusters ours.yaml                             check a file: lists every fault
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``clusters``."""
    parser = add_parser(commands, "clusters", "list clusters, or print one", _DESCRIPTION, run)
    add_flag(parser, "name NAME", "a preset or a cluster file", nargs="?")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the one cluster."""
    from megatron_pulse.planner.cluster.cluster import cluster, cluster_presets, to_record, to_yaml

    if args.name is not None:
        one = cluster(args.name)
        preset = cluster_presets().get(args.name)
        text = to_yaml(one) if preset is None else preset.read_text(encoding="utf-8")
        print_result(args, text.splitlines(), lambda: to_record(one))
        return
    known = [cluster(name) for name in cluster_presets()]
    rows = [_TITLES, *map(_row, known)]
    print_result(args, table(rows, left=(0, 3, 4)), lambda: [to_record(one) for one in known])


_TITLES = ("cluster", "nodes", "devices", "device", "inside, between nodes (GB/s)")


def _row(one: Cluster) -> tuple[str, ...]:
    device = one.device if isinstance(one.device, str) else f"{one.device.tflops:g} TFLOP/s"
    links = [link for link in (one.intra_node, one.inter_node) if link is not None]
    shown = ", ".join(f"{link.kind} {link.bandwidth_gbs:g}" for link in links)
    return (one.name, str(one.nodes), str(one.num_devices), device, shown)
