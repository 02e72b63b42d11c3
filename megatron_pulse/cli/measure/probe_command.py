"""``pulse probe``: measure a cluster file with the ranks of a job."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
)
from megatron_pulse.cli.launcher_env import ranks_of
from megatron_pulse.cli.output import add_json, print_result
from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ONE
from megatron_pulse.errors import UserError
from megatron_pulse.profile.roofline import PRESETS
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    import torch

    from megatron_pulse.runtime.measure.probe import ProbeResult

_DESCRIPTION = """\
Measures what planning needs, between the ranks on which it is started: latency and bandwidth inside
a node and between nodes, contention of the devices of a node, efficiency of all-reduce, times of
all-to-alls in a node (context parallelism), bandwidth between GPU and host memory, memory and speed
of the devices. Devices are of one kind if they have
the same name, memory within 2 % and measured speeds within 25 %; a file of several kinds has their
names. It takes some ten seconds. Start it as training is started, on idle machines. Host names tell
nodes apart and are not written.

examples:
  torchrun --nproc-per-node 2 -m megatron_pulse.cli probe -o cluster.yaml
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m megatron_pulse.cli probe -o cluster.yaml --device A100-80GB
  srun --nodes 2 --ntasks-per-node 8 python -m megatron_pulse.cli probe -o cluster.yaml
  pulse clusters cluster.yaml                          look at it
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``probe``."""
    parser = add_parser(commands, "probe", "measure the links of a cluster", _DESCRIPTION, run)
    add = partial(add_flag, parser)
    add("-o, --output YAML", "the cluster file to write", writes=[".yaml"])
    add("--name NAME", "of the cluster (default: probed)", default="probed")
    add(
        "--device NAME",
        "device of the cluster file: a preset of 'pulse profile', or a profile's .json file "
        "(default: the preset of this name, else measured by a matrix product and a copy)",
    )
    add("--backend", "default: nccl where there is a GPU", choices=("gloo", "nccl"))
    add("--max-mb X", "largest message (default 32)", within=FROM_ONE, default=32.0)
    add(
        "--timeout-s S",
        "longest wait of one rank for another (default 60)",
        within=ABOVE_ZERO,
        default=60.0,
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure on all ranks; rank 0 writes and prints."""
    ranks = job_of(os.environ)
    faults = _faults(args, ranks)
    if faults and ranks["RANK"] != "0":
        raise SystemExit(2)  # rank 0 prints why
    require(faults)
    import torch

    from megatron_pulse.profile.measurement.machine import compute_as_a_rank
    from megatron_pulse.runtime.failure_board import PulseError
    from megatron_pulse.runtime.measure.probe import ProbeSettings, probe

    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        if int(ranks["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UserError(
                f"local rank {ranks['LOCAL_RANK']} has no GPU; there are "
                f"{torch.cuda.device_count()}; start as many ranks, or give --backend gloo"
            )
        device = torch.device("cuda", int(ranks["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        compute_as_a_rank()
    max_bytes = int(args.max_mb * 2**20)
    settings = ProbeSettings(args.name, device, max_bytes, args.timeout_s, args.device)
    with as_user_error(PulseError), _joined(ranks, backend, args.timeout_s):
        with ProgressLine("probing", 7, "measurements", silent=ranks["RANK"] != "0") as line:

            def progress(what: str) -> None:
                line.what = what
                line.advance()

            probed = probe(settings, progress)
    if probed is not None:
        _write(args, probed, device)


def job_of(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun or srun give them."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: environment[name] for name in names[3:] if name in environment}
    found |= ranks_of(environment)
    if "RANK" not in environment and "SLURM_PROCID" in environment:
        if "MASTER_ADDR" not in found and "SLURM_JOB_NODELIST" in environment:
            found["MASTER_ADDR"] = _first_host(environment["SLURM_JOB_NODELIST"])
        job = environment.get("SLURM_JOB_ID", "0")
        found.setdefault("MASTER_PORT", str(20000 + int(job) % 10000))
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(
            f"no job of several ranks ({', '.join(missing)} not set); start it with: torchrun "
            "--nproc-per-node 2 -m megatron_pulse.cli probe -o cluster.yaml"
        )
    return found


def _first_host(nodes: str) -> str:
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return shown.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UserError(
            f"scontrol does not name the job's hosts; set MASTER_ADDR ({error})"
        ) from error


@contextmanager
def _joined(ranks: Mapping[str, str], backend: str, timeout_s: float) -> Iterator[None]:
    import torch.distributed as dist

    from megatron_pulse.runtime.failure_board import PulseError

    os.environ.update(ranks)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise PulseError(f"rank {ranks['RANK']} cannot join the others: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _write(args: argparse.Namespace, probed: ProbeResult, device: torch.device) -> None:
    from megatron_pulse.planner.cluster.cluster import save_cluster, to_yaml

    comment = _comment(probed, device)
    if args.output is not None:
        save_cluster(probed.cluster, args.output, comment)
    lines = to_yaml(probed.cluster, comment).splitlines()
    if args.output is not None:
        lines.append(f"written to {args.output}")
    print_result(args, lines, lambda: asdict(probed))


def _comment(probed: ProbeResult, device: torch.device) -> str:
    """Comment on the measurement's method, place and spread, and on its gaps."""
    import torch

    cluster = probed.cluster
    lines = [
        f"Measured by 'pulse probe' on {date.today()}: {cluster.nodes} node(s), "
        f"{cluster.devices_per_node} rank(s) on each, {probed.backend}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}."
    ]
    if cluster.mixed:
        for kind in cluster.kinds:
            ranks = [str(r) for r in range(cluster.num_devices) if cluster.kind_of(r) == kind]
            lines.append(f"{kind.name}: rank(s) {', '.join(ranks)}.")
        lines.append(
            "Run 'pulse profile -o KIND.json' on a device of each kind, and name the file as "
            "'device' of the kind."
        )
    for pair in probed.pairs:
        a, b = pair.ranks
        spread = 100 * pair.spread_s[-1] / pair.median_s[-1]
        lines.append(
            f"Ranks {a}-{b}: {pair.bandwidth_gbs:.3g} GB/s, {pair.latency_us:.3g} us; quartiles of "
            f"{pair.num_bytes[-1] / 2**20:g} MiB are {spread:.0f} % of the median apart."
        )
    for name in ("intra_node", "inter_node"):
        stream = probed.streams.get(name)
        if stream is not None:
            lines.append(
                f"{name}: one stream {stream.alone_gbs:.3g} GB/s; each of {stream.num_pairs} at "
                f"once {stream.at_once_gbs:.3g} GB/s."
            )
        elif name == "intra_node" or cluster.nodes > 1:
            lines.append(f"{name}: too few ranks to measure contention.")
    for each in cluster.all_to_alls:
        rate = each.num_bytes[-1] / each.seconds[-1] / 1e9
        lines.append(
            f"All-to-alls of {each.ranks} ranks: {1e6 * each.seconds[0]:.3g} us for "
            f"{each.num_bytes[0]} bytes, {rate:.3g} GB/s for {each.num_bytes[-1] / 2**20:g} MiB."
        )
    if cluster.devices_per_node == 1:
        lines.append("One rank on each node: intra_node is a copy of inter_node.")
    return "\n".join(lines)


def _faults(args: argparse.Namespace, ranks: Mapping[str, str]) -> list[str]:

    faults = []
    if int(ranks["WORLD_SIZE"]) < 2:
        faults.append("a link has two ends: start 2 ranks or more")
    if args.output is None and args.json is None:
        faults.append("give -o cluster.yaml, or --json to print the measurements")
    faults += command_faults(args)
    if not args.name:
        faults.append("--name is empty")
    if args.backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            faults.append("--backend nccl: torch finds no GPU here; leave it out, or give gloo")
    if args.device is not None and args.device not in PRESETS and not Path(args.device).is_file():
        faults.append(
            f"--device {args.device} is no file of 'pulse profile' and no preset; there are: "
            + ", ".join(PRESETS)
        )
    return faults
