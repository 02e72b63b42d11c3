"""However a run ends: it says how, saves where it was told to stop, and leaves no process."""

from __future__ import annotations

import os
import platform
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_pulse.recipe.examples import example_text
from tests.integration.runs import BASE, TINY, pipeline
from tests.launch.sessions import BIN, Session, session
from tests.ranks import free_port

TRAINING = [
    "launch/pretrain_diffusion.py", *TINY["uvit"], *BASE,
    "--global-batch-size", "4", "--train-iters", "100000", "--save-interval", "3",
]  # fmt: skip


def train(launcher: str, save: Path, *flags: str, ranks: int = 2) -> list[str | Path]:
    first = [BIN / "pulse", "run"] if launcher == "pulse run" else [BIN / launcher, "--standalone"]
    own = ["--nproc-per-node", str(ranks)]
    return [*first, *own, *TRAINING, *pipeline(ranks), "--save", str(save), *flags]


def saved(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def importing(run: Session) -> bool:
    """True if two ranks catch SIGTERM, the last signal caught before their long imports."""
    own = Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
    num_catching = 0
    for pid in run.children():
        try:
            said = Path(f"/proc/{pid}/cmdline").read_bytes()
            masks = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        except OSError:  # ended meanwhile
            return False
        if said != own:  # no fork that is to become a rank
            num_catching += any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)
    return num_catching == 2


def assert_stopped_at_the_last_step(run: Session, folder: Path, order: str) -> None:
    steps = [int(step) for step in re.findall(r"iteration +(\d+)/", run.said())]
    assert saved(folder) == steps[-1]
    assert run.said().count(f"stopped ({order}) after step {steps[-1]}: saved in") == 1


def test_everybody_told_to_stop_again_and_again(tmp_path: Path) -> None:
    """As Slurm does: the launcher and the ranks, in any order, several times."""
    with session(train("pulse run", tmp_path)) as run:
        run.wait_for("iteration        4/")
        pids = [run.process.pid, *run.children()]
        assert len(pids) == 3
        for _ in range(5):
            for pid in random.sample(pids, len(pids)):
                try:
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)
        assert run.ended() == 128 + signal.SIGTERM
        assert_stopped_at_the_last_step(run, tmp_path, "SIGTERM")
        assert "Traceback" not in run.said() and "elastic" not in run.said()


TRAINS = """
import time
from megatron_pulse.runtime.stop_signals import STOP
STOP.listen()
STOP.defer()
print("trains\\n", end="", flush=True)
while STOP.received is None:
    time.sleep(0.02)
time.sleep(1)
print(f"saved ({STOP.received.name})\\n", end="", flush=True)
"""


def test_ctrl_c_in_start_up_and_in_training(tmp_path: Path) -> None:
    with session(train("pulse run", tmp_path)) as run:
        run.wait_until(lambda: importing(run), "two ranks", 120)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        assert run.said() == ("stopped (SIGINT) before the first step; nothing to save\n")
    (tmp_path / "trains.py").write_text(TRAINS)
    own = ["--nproc-per-node", "2", str(tmp_path / "trains.py")]
    with session([BIN / "pulse", "run", *own]) as run:
        run.wait_until(lambda: run.said() == "trains\n" * 2, "two ranks", 120)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        assert run.said() == "trains\n" * 2 + "saved (SIGINT)\n" * 2


@pytest.mark.parametrize("moment", ["", "training on 2 rank(s)"])
def test_ctrl_c_before_ranks_are_up_is_one_line(moment: str, tmp_path: Path) -> None:
    """To all processes, as a terminal sends it: during imports, and as ranks are started."""
    recipe = ["digits.toml", f"output={tmp_path / 'run'}", "parallel.pipeline=2"]
    (tmp_path / "digits.toml").write_text(example_text("digits"))
    asked = ["env", "--default-signal=INT"]  # a suite in the background ignores it
    command = [*asked, BIN / "pulse", "train", tmp_path / recipe[0], *recipe[1:]]
    with session(command) as run:
        if moment:
            run.wait_for(moment)
        else:
            run.wait_until(lambda: imports_torch(run.process.pid), "imports", 120)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        lines = [line for line in run.said().splitlines() if line]
        assert len(lines) <= 2 and "Traceback" not in run.said()
        ends = ("pulse: interrupted", "pulse train: interrupted", "stopped (SIG")
        assert lines[-1].startswith(ends)


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_torchrun_killed(tmp_path: Path) -> None:
    """Nobody could tell the ranks: the kernel does, each by itself."""
    with session(train("torchrun", tmp_path, ranks=1)) as run:
        run.wait_for("iteration        4/")
        run.process.kill()
        assert run.ended() == -signal.SIGKILL
        assert_stopped_at_the_last_step(run, tmp_path, "SIGTERM: the launcher has exited")
        assert "Broken pipe" not in run.said()


def test_a_rank_killed_after_a_save(tmp_path: Path) -> None:
    with session(train("pulse run", tmp_path)) as run:
        run.wait_for("iteration        4/")
        os.kill(run.children()[1], signal.SIGKILL)
        assert run.ended() == 1
        said = run.said()
        assert said.count("rank 0 stops; first failure in this job: rank 0: ") == 1
        assert said.count("pulse run: rank 1 exited on SIGKILL") == 1
        assert "Traceback" not in said
        assert saved(tmp_path) >= 3


def test_a_stopped_rank_is_named_though_it_hosts_the_store(tmp_path: Path) -> None:
    """No launcher, two replicas: the other rank waits in a collective of Megatron's, and the store
    in which ranks say what failed stands still as well."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [sys.executable, *TRAINING, *pipeline(1)]
    command += ["--save", tmp_path, "--pulse-timeout-s", "15"]
    with (
        session(command, **job, RANK="0", LOCAL_RANK="0") as host,
        session(command, **job, RANK="1", LOCAL_RANK="1") as other,
    ):
        other.wait_for("iteration        4/")
        os.kill(host.process.pid, signal.SIGSTOP)
        assert other.ended() == 1
        pid = host.process.pid
    said = other.said()
    assert "no progress for 15 s (--pulse-timeout-s); rank 0 (process " in said
    assert f"(process {pid} on {platform.node()}): no response" in said
    assert re.search(r"rank 1: (step \d+|saving step \d+|between steps), in Megatron's \S+ ", said)
    assert "Traceback" not in said
    assert "this rank: " in (tmp_path / "failures" / "stacks1.txt").read_text()


FORKS = """
import os, signal, sys, time
from megatron_pulse.runtime.stop_signals import STOP
STOP.listen()
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(0.2)
if sys.argv[1] == "exit":
    os._exit(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
SOLVES = """
import subprocess
from megatron_pulse.processes import ending_with_us
subprocess.run(ending_with_us(["sleep", "600"]), start_new_session=True)
"""


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_what_a_rank_has_forked_ends_with_it(how: str) -> None:
    with session([sys.executable, "-W", "ignore", "-c", FORKS, how]) as run:
        assert run.ended() == (1 if how == "exit" else -signal.SIGKILL)
        assert run.said() == "ready\n"


def test_a_solver_ends_with_who_asked_it() -> None:
    with session([sys.executable, "-c", SOLVES]) as run:
        run.wait_until(lambda: len(run.processes()) == 2, "the solver", 120)
        run.process.kill()
        assert run.ended() == -signal.SIGKILL


def test_refused_it_ends_with_the_reason_alone(tmp_path: Path) -> None:
    wrong = ["--lr", "0", "--train-iters", "0"]
    with session(train("pulse run", tmp_path, *wrong, ranks=1)) as run:
        assert run.ended() == 1
        assert run.said() == (
            "error: this run cannot start (2 faults):\n"
            "  - --train-iters must be positive\n"
            "  - --lr must be given and positive\n"
        )
