"""``pulse run``: torchrun, with clear messages and exit status at the end of a run."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from megatron_pulse.cli.flag_checks import add_parser, require
from megatron_pulse.dataclass_flags import TO_4096
from megatron_pulse.errors import UserError
from megatron_pulse.processes import (
    RANKS_FOLDER,
    end_on_interrupt,
    port_is_taken,
    raise_on_interrupt,
)

_DESCRIPTION = """\
Starts ranks as torchrun does, with torchrun's flags. Errors of ranks come last, without
torchrun's 35 lines. Ranks that are told to stop have the time to save; torchrun kills them after
30 s.
The exit status is 0, 1 if a rank failed, or 128 plus the number of the signal.
On a CPU a rank has one thread, since the last bits of results depend on that; --threads N, before
the script, or OMP_NUM_THREADS changes it.
Ranks of one node use a free port unless --master-port or a rendezvous is given, so that several
runs can share a machine.

examples:
  pulse run --nproc-per-node 4 launch/pretrain_diffusion.py --pulse-backbone uvit-s ...
  pulse run --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST --master-port 29500 \\
      launch/pretrain_diffusion.py --pulse-plan plan.json ...
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run``."""
    parser = add_parser(commands, "run", "start training on several ranks", _DESCRIPTION, run)
    parser.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="torchrun's flags, a script, and the script's flags",
    )
    parser.prefix_chars = "\0"  # the flags are torchrun's
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> None:
    """Run the ranks; ends the process with their status if it is not 0."""
    if args.command_line[:1] in (["-h"], ["--help"]):
        args.print_help()
        return
    if not args.command_line:
        raise UserError("no script: pulse run --nproc-per-node 2 launch/pretrain_diffusion.py ...")
    end_on_interrupt()  # until ranks start
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "86400")
    import torch.distributed.elastic.multiprocessing.api as processes
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from megatron_pulse.profile.warnings import configured_threads, rank_threads

    logging.disable(logging.ERROR)  # the launcher's; ranks print their own errors
    processes._terminate_process_handler = _Orders()
    line = _read(args.command_line)
    if line.threads is not None or configured_threads() is None:
        os.environ["OMP_NUM_THREADS"] = str(line.threads or rank_threads())
    is_file = not (line.no_python or line.module or line.run_path)
    if is_file and not Path(line.training_script).is_file():
        raise UserError(f"{line.training_script}: there is no such script")
    folder = tempfile.TemporaryDirectory()
    os.environ[RANKS_FOLDER] = folder.name
    try:
        torchrun.run(line)
    except ChildFailedError as error:
        for number, failure in error.failures.items():
            if failure.exitcode < 0:  # the rank could not print anything
                rank = _rank_of(number, Path(folder.name))
                print(f"pulse run: rank {rank} exited on {failure.signal_name()}", file=sys.stderr)
        sys.exit(1)
    except processes.SignalException as told:
        sys.exit(128 + told.sigval)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        reason = str(error) or "their number must be 1 or more"
        if port_is_taken(error):
            reason = (
                f"another program has port {line.master_port}: give --master-port another, or on "
                "one node leave it out"
            )
        raise UserError(f"ranks cannot be started: {reason}") from error
    finally:
        folder.cleanup()
        raise_on_interrupt()


def _rank_of(number: int, folder: Path) -> str:
    """Rank of the launcher's rank ``number``, which a plan may have renumbered."""
    try:
        rank = (folder / str(number)).read_text()
    except OSError:
        return str(number)
    return rank if rank == str(number) else f"{rank} (launcher's rank {number})"


def hold_interrupts_of_ranks() -> None:
    """Block SIGINT in ranks until ``STOP.listen``: a starting interpreter prints a traceback.

    Ranks inherit the signal mask of the main thread. Another thread receives the signal for this
    process, whose handlers run in the main thread nevertheless.
    """
    threading.Thread(target=threading.Event().wait, name="interrupts", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _read(words: list[str]) -> argparse.Namespace:
    """torchrun's command line with ``--threads``.

    Ranks of one node without a rendezvous flag use a free port of this machine.
    """
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.add_argument("--threads", type=int)
    fixed = parser.get_default("master_port")
    parser.set_defaults(master_port=None)
    line: argparse.Namespace = parser.parse_args(words)
    require(TO_4096.faults("--threads", line.threads))
    meets = line.rdzv_backend != "static" or line.rdzv_endpoint or line.master_port
    if line.nnodes in ("1", "1:1") and not meets:
        line.standalone = True
        line.local_addr = line.local_addr or "127.0.0.1"  # the machine's name may not resolve
    line.master_port = line.master_port or fixed
    return line


class _Orders:
    """Signal handler for torchrun that obeys the first signal only.

    Further signals would end torchrun before its ranks. A second Ctrl-C ends the ranks at once.
    """

    def __init__(self) -> None:
        self._told: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        if self._told is None or self._told == number == signal.SIGINT:
            self._told = number
            raise SignalException(f"got signal {number}", signal.Signals(number))
