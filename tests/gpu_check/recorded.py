"""A rank of a training that is recorded: ``tests.integration.runs.train`` in a new process.

    pulse run --nproc-per-node 2 -m tests.gpu_check.recorded FOLDER FLAG...

What it found goes to ``FOLDER/rankN``. With PULSE_CHECK_SYNCS=1 it counts where the host waits for
the GPU in the last step; with PULSE_CHECK_KILL=R rank R is killed in the second one.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_pulse.processes import end_with_parent


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


def main() -> None:
    """Train and write."""
    end_with_parent(signal.SIGTERM)
    folder, *flags = sys.argv[1:]
    rank = os.environ["RANK"]
    warnings.filterwarnings("ignore")
    from megatron_pulse.integration.megatron import compat

    compat.install()
    share_gpus()
    from megatron_pulse.integration.loop.throughput import peak_memory
    from tests.integration.runs import Kill, train

    seen: dict[str, Any] = {"step_s": [], "syncs": Counter()}
    watch_steps(seen, os.environ.get("PULSE_CHECK_SYNCS") == "1")
    killed = os.environ.get("PULSE_CHECK_KILL")
    kill = None if killed is None else Kill(int(killed), 2)
    found = {**on_cpu(train(flags, kill)), **seen, "peak_bytes": peak_memory()[0]}
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
