"""What many test ranks would work out again: once for all processes of a session, kept in files.

Nothing is kept where no session has said where (``FOLDER``), as in the commands of benchmarks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing

FOLDER = "PULSE_TESTS_REMEMBER"
"""The variable that names the folder which all processes of a session share."""


def remembered[T](key: object, work_out: Callable[[], T]) -> T:
    """``work_out()``, or what it was for the same ``key`` (by its repr) in any process before.

    Who comes while another works it out waits for that one.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return work_out()
    path = Path(folder) / hashlib.sha256(repr(key).encode()).hexdigest()
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with replacing(path) as new:
                new.write_bytes(pickle.dumps(work_out()))
    found: T = pickle.loads(path.read_bytes())
    return found


def remember_analyses() -> None:
    """Runs of Megatron in this process and its children take analytic profiles and counts of
    operations and parameters, which depend on the backbone alone, from those before them."""
    from megatron_pulse.integration.loop import throughput
    from megatron_pulse.integration.planning import run_plan

    _remember(run_plan, "analyse")
    _remember(run_plan, "count_parameters")
    _remember(run_plan, "count_trained")
    _remember(throughput, "model_flops")


def cache_small_chains() -> None:
    """Chains of small modules are kept in the cache of this session too, as those of large ones:
    torch.export takes seconds, in every rank. Who needs one that another derives waits for it."""
    from megatron_pulse.tracing import chains

    cached = chains.cached_chain

    def found(module: Any, *args: Any) -> Any:
        with _locked(type(module).__name__):
            return cached(module, *args)

    chains.is_small = lambda module: False
    chains.cached_chain = found


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield
        return
    with open(Path(folder) / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remember(module: Any, name: str) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def known(backbone: Any, *args: Any, **options: Any) -> Any:
        said = sorted(option for option, given in options.items() if given is not None)
        key = name, backbone.record, args, said, options.get("token_slices")
        return remembered(key, lambda: original(backbone, *args, **options))

    setattr(module, name, known)
