"""launch/slurm with a controller that is busy, and sweeps as people write them: no Slurm needed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = {
    # A step: ends with its status, or saves and ends when it is asked to.
    "srun": """
        trap 'echo "${0##*/}: asked" >>"$STATE/log"; echo 7 >"$STATE/saved"; exit 3' TERM
        echo $$ >"$STATE/step.new"; mv "$STATE/step.new" "$STATE/step"
        [ -z "${ENDS:-}" ] || exit "$ENDS"
        while :; do sleep 0.1; done""",
    "scancel": 'kill -TERM "$(cat "$STATE/step")"',
    "squeue": '[ "${END:-}" = none ] || date -d "+10 minutes" +%FT%T',
    "scontrol": """
        case "$*" in
            *"show job"*) echo "JobId=5 JobState=RUNNING PreemptTime=${PREEMPTED:-None} Nodes=1" ;;
            *hostnames*) printf 'no-such-node-1\\nno-such-node-2\\n' ;;
            *"show node"*) echo "NodeName=n NodeAddr=10.0.0.7 Port=1" ;;
            *) echo "$*" >>"$STATE/log" ;;
        esac""",
}
FAILS = """#!/bin/bash
left=$(cat "$STATE/fails-${0##*/}" 2>/dev/null || echo 0)
if ((left > 0)); then
    echo $((left - 1)) >"$STATE/fails-${0##*/}"
    echo "${0##*/}: error: Unable to contact slurm controller" >&2
    exit 1
fi
"""


@dataclass(frozen=True)
class Stand:
    """Slurm's commands in ``folder``, the first calls of which fail."""

    folder: Path
    environment: dict[str, str]

    def bash(self, script: str) -> subprocess.Popen[str]:
        """``script`` with job.sh, as pretrain.sbatch runs it."""
        begin = "set -euo pipefail; source launch/slurm/job.sh; "
        return subprocess.Popen(
            ["bash", "-c", begin + script],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *, asked: bool = False) -> tuple[int, str]:
        """``pulse_run`` to its end, or until it is ``asked`` to stop; (status, what it said)."""
        save = self.folder / "save"
        save.mkdir()
        (save / "latest_checkpointed_iteration.txt").symlink_to(self.folder / "saved")
        process = self.bash(f"pulse_run {save} train")
        try:
            if asked:
                deadline = time.monotonic() + 60
                while not (self.folder / "step").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.send_signal(signal.SIGUSR1)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, said

    @property
    def log(self) -> list[str]:
        """Signals that ranks and controller were sent."""
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


def stand(folder: Path, fails: dict[str, int], **environment: str) -> Stand:
    (folder / "bin").mkdir()
    for name, script in STAND_INS.items():
        path = folder / "bin" / name
        path.write_text(f"{FAILS}{script}\n")
        path.chmod(0o755)
    for name, count in fails.items():
        (folder / f"fails-{name}").write_text(str(count))
    ours = {"STATE": str(folder), "SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1"}
    ours |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}
    return Stand(folder, {**os.environ, **ours, **environment})


@pytest.mark.parametrize(
    ("fails", "environment", "said"),
    [
        ({"scontrol": 1, "squeue": 1}, {}, "squeue does not say when job 5 ends; asked again."),
        ({"scancel": 100}, {"END": "none"}, "scancel failed (status 1); asking through srun."),
        ({"scontrol": 2}, {"PULSE_SLURM_SECONDS": "1"}, "does not say how job 5 is"),
    ],
    ids=["each once", "scancel always, squeue says nothing", "state unknown"],
)
def test_a_busy_controller_does_not_end_a_chain(
    fails: dict[str, int], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    job = stand(tmp_path, fails, **environment)
    status, output = job.run(asked=True)
    assert (status, job.log) == (3, ["srun: asked", "requeue 5"]), output
    assert said in output and "slurm: requeued; continues from iteration 7." in output
    assert "did not stop in time" not in output


def test_preemption_is_asked_until_the_controller_says(tmp_path: Path) -> None:
    job = stand(tmp_path, {"scontrol": 2}, ENDS="3", PREEMPTED="2026-01-01T00:00:00")
    status, output = job.run()
    assert (status, job.log) == (3, ["requeue 5"]), output
    failed = "slurm: 'scontrol --oneliner show job 5' failed (status 1); called again in"
    assert output.count(failed) == 2


@pytest.mark.parametrize("failing", [0, 100])
def test_ranks_that_fail_are_not_requeued(failing: int, tmp_path: Path) -> None:
    job = stand(tmp_path, {"scontrol": failing}, ENDS="4", PULSE_SLURM_SECONDS="1")
    status, output = job.run()
    assert (status, job.log) == (4, []), output
    unknown = "does not say whether job 5 was preempted: not requeued. If it was, submit it again"
    assert (unknown in output) == bool(failing)


def test_a_job_that_cannot_be_requeued_says_so(tmp_path: Path) -> None:
    job = stand(tmp_path, {}, PULSE_SLURM_SECONDS="0")
    (job.folder / "bin" / "scontrol").write_text(
        f"#!/bin/bash\n[[ $* != requeue* ]] || exit 1\n{STAND_INS['scontrol']}\n"
    )
    status, output = job.run(asked=True)
    assert status == 3 and "not requeued after all: scontrol requeue 5, or submit" in output


@pytest.mark.parametrize(("failing", "status"), [(1, 0), (100, 1)])
def test_the_first_node_is_asked_for_again(failing: int, status: int, tmp_path: Path) -> None:
    seconds = "1" if failing > 1 else "60"
    job = stand(tmp_path, {"scontrol": failing}, PULSE_SLURM_SECONDS=seconds)
    process = job.bash("pulse_master_addr")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == status
    assert (output.splitlines()[-1] == "10.0.0.7") == (status == 0), output


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        ("# later\n\n", 1, "has no line 1: choose --array within its 0 line(s)"),
        ("--lr 1\n  # no\n\n--lr 2", 2, "[--common][--lr][2]"),
        ("--lr 1\n  # no\n\n--lr 2", 3, "has no line 3: choose --array within its 2 line(s)"),
        ("--lr 1\n", 0, "no line 0: lines with flags are numbered from 1. Use --array 1-N"),
        ("\ufeff# a\r\n\r\n--lr 1e-4 \r\n", 1, "[--common][--lr][1e-4]"),
        ("--data \"my photos\" --x='$HOME' a\\ *", 1,
         "[--common][--data][my photos][--x=$HOME][a *]"),
        ('--data "my photos\n--lr 1', 1, "line 1: its quotes or backslashes do not end: --data"),
    ],
)  # fmt: skip
def test_a_line_of_a_sweep(content: str, line: int, expected: str, tmp_path: Path) -> None:
    copied(tmp_path)
    (tmp_path / "launch/slurm/pretrain.sbatch").write_text('printf "[%s]" "$@"\n')
    (tmp_path / "sweep.txt").write_bytes(content.encode())
    slurm = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": str(line)}
    done = script(tmp_path, ["array.sbatch", "sweep.txt", "--common"], slurm)
    assert done.returncode == (0 if expected.startswith("[") else 2), done.stderr
    if expected.startswith("["):
        assert done.stdout == expected
    else:
        assert expected in done.stderr


@pytest.mark.parametrize(
    "model", [["--backbone", "b"], ["--module", "m.py:b"], ["--module=m:b"], []]
)
def test_what_is_profiled_is_named_to_profile_alone(model: list[str], tmp_path: Path) -> None:
    copied(tmp_path, "printf '[%s]' \"$@\"; echo")
    what = [*model, "--option", "a=1", "--train", "*.bias", "--freeze=c"]
    how = ["--cluster", "c.yaml", "--global-batch-size", "8", "-o", "plan.json"]
    done = script(tmp_path, ["tune.sbatch", *what, *how], {"SLURM_JOB_ID": "5"})
    if not model:
        assert done.returncode == 2 and "missing --backbone or --module; usage: " in done.stderr
        return
    assert done.returncode == 0, done.stderr
    profiled, tuned = done.stdout.splitlines()
    assert profiled.startswith("".join(f"[{word}]" for word in ["profile", *what, "-o"]))
    assert tuned.startswith("".join(f"[{word}]" for word in ["tune", *how, "--profile"]))


def copied(folder: Path, pulse: str = "") -> None:
    """The scripts of Slurm in ``folder``, with a stand-in for the command ``pulse``."""
    for name in ("launch/slurm", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    for path in (ROOT / "launch/slurm").iterdir():
        (folder / "launch/slurm" / path.name).write_bytes(path.read_bytes())
    (folder / ".venv/bin/pulse").touch(mode=0o755)
    (folder / ".venv/bin/pulse").write_text(f"#!/usr/bin/env bash\n{pulse}\n")


def script(
    folder: Path, command: list[str], slurm: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script of ``copied`` as Slurm would."""
    return subprocess.run(
        ["bash", f"launch/slurm/{command[0]}", *command[1:]],
        cwd=folder,
        env={**os.environ, **slurm, "PULSE_ROOT": str(folder)},
        capture_output=True,
        text=True,
    )
