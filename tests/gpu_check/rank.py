"""A rank of a check, as ``pulse run`` starts it:

    pulse run --nproc-per-node 2 -m tests.gpu_check.rank train FOLDER FLAG...

``train`` is ``tests.integration.runs.train`` in a new process; ``cases`` trains the (family, case)
pairs of ``FOLDER/cases`` one after the other. What each rank found goes to ``FOLDER/rankN``. The
others measure what two ranks do together, and rank 0 writes that to a file, as JSON.

With PULSE_CHECK_SYNCS=1 a training counts where the host waits for the GPU in the last step; with
PULSE_CHECK_KILL=R its rank R is killed in the second one.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_pulse.processes import end_with_parent
from tests.gpu_check.alone import synchronise, timed

if TYPE_CHECKING:
    from megatron_pulse.runtime.p2p.channels import Channel, Opener


def share_gpus() -> None:
    """Where there are fewer GPUs than ranks, have ranks share them; CUDA is not started."""
    import torch

    if number := torch.cuda.device_count():
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", "0")) % number)


def take_gpu() -> str:
    """The device of this rank, where CUDA has as many hardware queues as in a run."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    share_gpus()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as set_cuda_connections has it
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def on_cpu(found: Any) -> Any:
    """Whatever has tensors in it, with those on the CPU."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), found)


def watch_steps(seen: dict[str, Any], counts_syncs: bool) -> None:
    """Note every step's seconds, and where the host waits for the GPU in the newest one."""
    import megatron.training.training as training
    import torch

    original = training.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            if counts_syncs:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            try:
                result = original(*args, **kwargs)
            finally:
                if counts_syncs:
                    torch.cuda.set_sync_debug_mode("default")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seen["step_s"].append(time.perf_counter() - began)
        waits = [w for w in said if "called a synchronizing" in str(w.message)]
        seen["syncs"] = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
        return result

    training.train_step = step


def train(folder: Path, *flags: str) -> None:
    """Train and write."""
    share_gpus()
    from megatron_pulse.integration.loop.throughput import peak_memory
    from tests.integration import runs

    seen: dict[str, Any] = {"step_s": [], "syncs": Counter()}
    watch_steps(seen, os.environ.get("PULSE_CHECK_SYNCS") == "1")
    killed = os.environ.get("PULSE_CHECK_KILL")
    kill = None if killed is None else runs.Kill(int(killed), 2)
    found = {**on_cpu(runs.train([*flags], kill)), **seen, "peak_bytes": peak_memory()[0]}
    _write(folder, found)


def kept_open(opener: Opener) -> Opener:
    """Channels that the next case has as well: NCCL takes half a second to make one. Each case ends
    when all that it sent has arrived."""
    found: dict[tuple[int, int], Channel] = {}

    def opened(group: Any, source: int, destination: int, timeout_s: float) -> Channel:
        if (source, destination) not in found:
            found[source, destination] = opener(group, source, destination, timeout_s)
        return found[source, destination]

    return opened


def cases(folder: Path, device: str) -> None:
    """Train all and write."""
    if device == "cuda":
        device = take_gpu()
    from megatron_pulse.runtime.p2p.channels import OPENERS
    from tests.runtime.tiny import run_cases

    for backend, opener in OPENERS.items():
        OPENERS[backend] = kept_open(opener)
    given = pickle.loads((folder / "cases").read_bytes())
    outcomes = run_cases([(family, replace(case, device=device)) for family, case in given])
    for outcome in outcomes:
        outcome.parameters, outcome.gradients = on_cpu((outcome.parameters, outcome.gradients))
    _write(folder, outcomes)


def _write(folder: Path, found: Any) -> None:
    (folder / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(found))


def probe(file: Path) -> None:
    """``pulse probe`` of these ranks."""
    from megatron_pulse.cli.main import main as pulse

    share_gpus()
    sys.exit(pulse(["probe", "--max-mb", "16", "-o", str(file)]))


def measure(of: Callable[[], Any], file: Path) -> None:
    """Measure and write."""
    import torch.distributed as dist

    rows = of()
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def all_reduce() -> list[dict[str, Any]]:
    """Sums of tensors on all ranks: what they are, and how long they take."""
    import torch
    import torch.distributed as dist

    device = torch.device(take_gpu())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows, world = [], dist.get_world_size()
    for power in range(10, 27 if device.type == "cuda" else 23, 4):
        tensor = torch.full((1 << power,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(tensor)
        assert tensor.eq(world * (world + 1) / 2).all(), f"{4 << power} bytes add up wrongly"
        took = []
        for _ in range(5):
            dist.barrier()
            took.append(timed(lambda t=tensor: dist.all_reduce(t), device)[1])
        seconds = median(took)
        moved = 2 * (world - 1) / world * (4 << power)
        rows.append({"bytes": 4 << power, "us": 1e6 * seconds, "GB/s": moved / seconds / 1e9})
    return rows


AHEAD = 100
MEGABYTES = 16


def ahead() -> list[dict[str, Any]]:
    """Many messages of new tensors, each waited for by the stream at once, while that has other
    work: as a step sends and receives them, and as torch's own."""
    import torch
    import torch.distributed as dist

    from megatron_pulse.planner.layout.routes import Payload
    from megatron_pulse.planner.schedule.message import Message
    from megatron_pulse.planner.schedule.operations import Operation, OpType
    from megatron_pulse.runtime.failure_board import default_board
    from megatron_pulse.runtime.p2p.transfers import Links

    device = torch.device(take_gpu())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.group.WORLD
    assert group is not None
    links = Links(group, default_board(), 60.0, device)
    links.connect(SimpleNamespace(messages=(), channels=((0, 1),)))  # type: ignore[arg-type]
    rank, size = dist.get_rank(), MEGABYTES << 20
    like = torch.empty(size, dtype=torch.uint8, device="meta")

    def by_links(i: int) -> Any:
        ends = (Operation(OpType.FORWARD, stage, i) for stage in (0, 1))
        message = Message(*ends, Payload.BOUNDARY, "0", source=0, destination=1)
        if rank == 0:
            links.send(message, torch.full((size,), i, dtype=torch.uint8, device=device))
            return links.complete_sends([message])
        links.receive(message, like)
        return links.wait(message)

    def by_torch(i: int) -> Any:
        tensor = torch.full((size,), i * (1 - rank), dtype=torch.uint8, device=device)
        work = group.recv([tensor], 0, 0) if rank else group.send([tensor], 1, 0)
        work.wait()
        return tensor

    rows = []
    for way, pass_on in {"as in a step": by_links, "torch's own": by_torch}.items():
        pass_on(0)
        synchronise(device)
        dist.barrier()
        before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            torch.cuda._sleep(2_000_000_000)  # cycles: a second or more
        began = time.perf_counter()
        right = torch.ones((), dtype=torch.bool, device=device)
        for i in range(AHEAD):
            got = pass_on(i)
            if rank:
                right &= got.eq(i).all()
            del got
        row: dict[str, Any] = {"way": way, "host s": time.perf_counter() - began}
        if device.type == "cuda":
            row["MB held"] = (torch.cuda.memory_reserved() - before) / 2**20
        synchronise(device)
        row["until all were done, s"] = time.perf_counter() - began
        assert bool(right), f"{way}: other bytes arrived"
        links.drain()
        rows.append(row)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rows)
    return [{"rank": r, **row} for r, its in enumerate(found) for row in its]


class OneGroup:
    """A channel that shares the pipeline's group with all others."""

    on_stream = True

    def __init__(self, group: Any, source: int, destination: int, timeout_s: float) -> None:
        self._group = group
        self._peer = destination if group.rank() == source else source

    def send(self, tensor: Any) -> Any:
        """See Channel."""
        return self._group.send([tensor], self._peer, 0)

    def receive(self, buffer: Any) -> Any:
        """See Channel."""
        return self._group.recv([buffer], self._peer, 0)


def channels() -> list[dict[str, Any]]:
    """Steps of a fold whose messages have channels of their own, and one group for all."""
    import torch
    import torch.distributed as dist

    device = take_gpu()
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
    from megatron_pulse.runtime.p2p import channels as module
    from model_specs import load_backbone
    from tests.runtime.equality import Case, join_pipeline, make_batches, make_pipeline

    config, group = join_pipeline("nccl")
    defer_wgrad()
    torch.use_deterministic_algorithms(False)
    backbone = load_backbone("uvit-l", {})
    case = Case("fold", 8, "wave", dtype="bfloat16", micro_batch_size=8, device=device)
    rows = []
    ways: dict[str, module.Opener] = {
        "a channel for each direction": module.NcclChannel,
        "one group": OneGroup,
    }
    for name, opener in ways.items():
        module.OPENERS["nccl"] = opener
        pipeline = make_pipeline(backbone, case, config, group)
        batches = make_batches(backbone, case, 0)
        took = []
        for _ in range(8):
            dist.barrier()
            took.append(timed(lambda p=pipeline, b=batches: p.step(b), torch.device(device))[1])
        rows.append({"messages go over": name, "step ms": 1e3 * median(took[3:])})
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
        del pipeline
    return rows


def main(what: str, place: str, *more: str) -> None:
    """Do what is asked for."""
    end_with_parent(signal.SIGTERM)
    warnings.filterwarnings("ignore")
    if what == "probe":
        return probe(Path(place))
    from megatron_pulse.integration.megatron import compat

    compat.install()
    if what in ("train", "cases"):
        return {"train": train, "cases": cases}[what](Path(place), *more)
    measure({"all_reduce": all_reduce, "ahead": ahead, "channels": channels}[what], Path(place))


if __name__ == "__main__":
    main(*sys.argv[1:])
