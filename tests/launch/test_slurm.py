"""The scripts of launch/slurm, submitted to a Slurm cluster of two nodes on this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_pulse.integration.loss_curve import read_scalars
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.runs import BASE, TINY, pipeline, run
from tests.launch.sessions import session
from tests.launch.slurm import SlurmCluster, SlurmError, slurm_cluster, why_no_slurm

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_slurm()), reason=f"no Slurm cluster: {why_no_slurm()}"),
]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 150  # some 6 s on an idle machine: three orders to stop come in between
LAYOUT = [*pipeline(2), "--global-batch-size", "4"]
TRAINING = [*TINY["uvit"], *BASE, *LAYOUT]
START_S = 120.0  # a start takes 8 s; other work may slow it down


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(num_nodes=2) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_left_running(cluster: SlurmCluster) -> Iterator[None]:
    """A test that fails leaves its nodes to the next."""
    yield
    cluster.command("scancel", "--user", "root")


class Training:
    """A job of two nodes with one rank each, and what it wrote."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *argv: str) -> None:
        """Submit ``argv`` (flags of sbatch, script, flags of the training)."""
        self.cluster = cluster
        self.tensorboard = folder / "tensorboard"
        self.output = folder / "job.out"
        self.job = cluster.submit(
            "--nodes=2", "--time=5", f"--output={self.output}", *argv,
            "--tensorboard-dir", str(self.tensorboard), "--tensorboard-log-interval", "1",
            cwd=ROOT,
        )  # fmt: skip

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def steps(self) -> list[int]:
        """Training steps in the order in which the job logged them."""
        return [int(step) for step in re.findall(r"iteration +(\d+)/ ", self.said())]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for ``condition``; the job's failure ends the wait with what it said."""

        def reached() -> bool:
            if condition():
                return True
            if self.cluster.field(self.job, "JobState") in ("FAILED", "TIMEOUT", "CANCELLED"):
                raise SlurmError(f"the job failed\n{self.said()[-6000:]}")
            return False

        self.cluster.wait_until(reached, f"{what}; the job said\n{self.said()[-3000:]}", START_S)

    def wait_for_step(self) -> int:
        """Wait until the job does steps that it had not done yet; the newest one."""
        before = len(self.steps())
        self.wait(lambda: len(self.steps()) > before, "a training step")
        return self.steps()[-1]

    def wait_for_start(self, number: int) -> None:
        """Wait until the job was started for the ``number``-th time."""
        self.wait(lambda: f"job {self.job}, start {number}," in self.said(), f"start {number}")

    def losses(self) -> list[float]:
        """The loss of every step, in fp32 as it was computed."""
        losses = read_scalars(self.tensorboard)["loss"]
        assert losses.steps == list(range(1, NUM_STEPS + 1))
        return losses.values


def pretrain(cluster: SlurmCluster, folder: Path, *flags: str) -> Training:
    steps = ["--train-iters", str(NUM_STEPS), "--save", str(folder / "checkpoints")]
    return Training(cluster, folder, "launch/slurm/pretrain.sbatch", *TRAINING, *steps, *flags)


def test_interrupted_training_has_the_losses_of_an_uninterrupted_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    steps = ["--train-iters", str(NUM_STEPS)]
    whole = run(2, *LAYOUT, *steps)

    parts = pretrain(cluster, tmp_path)
    parts.wait_for_step()
    cluster.submit(  # preempts the training, which has 90 s of grace
        "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap", "true"
    )
    parts.wait_for_start(2)
    parts.wait_for_step()
    cluster.command("scontrol", "requeue", parts.job)
    parts.wait_for_start(3)
    parts.wait_for_step()
    # What the controller sends before the time limit; it would take more than a minute.
    cluster.command("scancel", "--batch", "--signal=USR1", parts.job)
    parts.wait_for_start(4)
    parts.wait(lambda: cluster.field(parts.job, "JobState") == "COMPLETED", "the training's end")

    assert cluster.field(parts.job, "Restarts") == "3"
    assert parts.said().count("stopped (SIGTERM) after step") == 3
    assert parts.steps() == list(range(1, NUM_STEPS + 1))  # none lost, none done twice
    assert parts.losses() == whole.losses


def test_an_array_trains_a_line_each_and_a_cancelled_one_ends_every_process(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("# seeds\n--seed 11 --train-iters 3\n\n--seed 22 --train-iters 100000\n")

    def start(line: int) -> Training:
        folder = tmp_path / f"line-{line}"
        folder.mkdir()
        return Training(
            cluster, folder, f"--array={line}", "launch/slurm/array.sbatch", str(sweep), *TRAINING,
            "--save", str(tmp_path / "runs"),
        )  # fmt: skip

    short = start(1)
    short.wait(lambda: cluster.field(short.job, "JobState") == "COMPLETED", "the training's end")
    assert re.search(r"^command: .* --seed 11 ", short.said(), re.MULTILINE)
    assert short.steps() == [1, 2, 3]
    assert (tmp_path / "runs/1/latest_checkpointed_iteration.txt").read_text() == "3"

    training = start(2)
    training.wait_for_step()
    assert re.search(r"^command: .* --seed 22 ", training.said(), re.MULTILINE)
    assert len(cluster.processes(of=training.job)) >= 7  # shell, srun, 2 x (stepd, torchrun, rank)

    cluster.command("scancel", training.job)
    # KillWait is 90 s: they have ended by themselves.
    cluster.wait_until(lambda: not cluster.processes(of=training.job), "all processes to end", 80)
    cluster.wait_for(training.job, {"CANCELLED"}, timeout_s=10)
    saved = tmp_path / "runs/2/latest_checkpointed_iteration.txt"
    assert int(saved.read_text()) == training.steps()[-1]  # it had the time for a checkpoint


def test_tune_writes_a_plan(cluster: SlurmCluster, tmp_path: Path) -> None:
    output, plan = tmp_path / "job.out", tmp_path / "plan.json"
    flags = "--micro-batch-size 2 --once-per-kind --seconds-per-layer 0.1"
    job = cluster.submit(
        "--time=5", f"--output={output}", f"--export=ALL,PULSE_PROFILE_FLAGS={flags}",
        "launch/slurm/tune.sbatch", "--backbone", "uvit-tiny", "--option", "in_channels=1",
        "--option=depth=4", "--cluster", "cpu", "--global-batch-size", "8", "--pipeline", "2",
        "--seconds", "1", "--solver", "none", "-o", str(plan), cwd=ROOT,
    )  # fmt: skip
    try:
        cluster.wait_for(job, {"COMPLETED"}, timeout_s=START_S)
    except SlurmError as error:
        raise SlurmError(f"{error}\n{output.read_text()}") from error
    assert load_checked(plan).backbone["options"]["depth"] == 4
    assert len(list(tmp_path.glob("plan.profile-*.json"))) == 1


@pytest.mark.parametrize(
    ("script", "argv", "fault"),
    [
        ("pretrain.sbatch", ["--load", "a", "--save", "b"], "use --pretrained-checkpoint a"),
        ("array.sbatch", ["no-such-file"], "usage: sbatch --array 1-N"),
        ("tune.sbatch", ["--backbone", "uvit-s"], "missing --cluster --global-batch-size -o"),
    ],
)
def test_what_cannot_run_says_so_at_once(
    cluster: SlurmCluster, tmp_path: Path, script: str, argv: list[str], fault: str
) -> None:
    output = tmp_path / "job.out"
    path = f"launch/slurm/{script}"
    assert "to start at" in cluster.command("sbatch", "--test-only", path, *argv, cwd=ROOT)
    job = cluster.submit("--time=1", f"--output={output}", path, *argv, cwd=ROOT)
    cluster.wait_for(job, {"FAILED"}, timeout_s=60)
    assert fault in output.read_text()


def test_submitted_elsewhere_it_names_the_repository(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = str(ROOT / "launch/slurm/pretrain.sbatch")
    job = cluster.submit("--time=1", script, cwd=tmp_path)
    cluster.wait_for(job, {"FAILED"}, timeout_s=60)
    assert "PULSE_ROOT" in (tmp_path / f"slurm-{job}.out").read_text()


ALONE = """
import time
from tests.launch.sessions import session
from tests.launch.slurm import slurm_cluster
with slurm_cluster(1) as cluster:
    job = cluster.submit("--output=/dev/null", "--wrap", "sleep 600")
    cluster.wait_until(lambda: len(cluster.processes(of=job)) >= 2, "shell and sleep", 60)
    print("running", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_cluster_ends_with_its_test_and_all_its_group(number: signal.Signals) -> None:
    with session([sys.executable, "-c", ALONE]) as run:
        run.wait_for("running")
        assert len(run.processes()) >= 7  # it, watchdog, munged, slurmctld, slurmd, the job
        os.killpg(run.process.pid, number)
        assert run.ended() != 0
