"""``pulse clusters``: the named clusters, and the file of one to start one's own from."""

from __future__ import annotations

import argparse
import json

from megatron_pulse.cli.errors import add_parser, mending

_DESCRIPTION = """\
Lists the clusters that plans can be made for by name, or prints one as YAML. Keep what it prints,
change it, and give the file wherever a cluster is named; 'pulse probe' measures one instead.
NAME:4 is NAME with 4 nodes.

examples:
  pulse clusters
  pulse clusters dgx-a100:4
  pulse clusters dgx-h100 > ours.yaml
  pulse clusters ours.yaml                             check a file: says everything that is wrong
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``clusters``."""
    parser = add_parser(commands, "clusters", "list clusters, or print one", _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", nargs="?", help="a preset or a cluster file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="clusters")


def run(args: argparse.Namespace) -> None:
    """Print the table, or the one cluster."""
    from megatron_pulse.planner.cluster.cluster import (
        ClusterError,
        cluster,
        cluster_presets,
        to_record,
        to_yaml,
    )

    with mending(ClusterError):
        if args.name is not None:
            one = cluster(args.name)
            if args.json:
                print(json.dumps(to_record(one), indent=1))
            elif args.name in cluster_presets():
                print(cluster_presets()[args.name].read_text(encoding="utf-8"), end="")
            else:
                print(to_yaml(one), end="")
            return
        known = [cluster(name) for name in cluster_presets()]
    if args.json:
        print(json.dumps([to_record(one) for one in known], indent=1))
        return
    heading = f"{'cluster':12s}{'nodes':>6s}{'devices':>9s}  {'device':22s}"
    print(f"{heading}inside, between nodes (GB/s)")
    for one in known:
        device = one.device if isinstance(one.device, str) else f"{one.device.tflops:g} TFLOP/s"
        links = [link for link in (one.intra_node, one.inter_node) if link is not None]
        shown = ", ".join(f"{link.kind} {link.bandwidth_gbs:g}" for link in links)
        print(f"{one.name:12s}{one.nodes:>6d}{one.num_devices:>9d}  {device:22s}{shown}")
