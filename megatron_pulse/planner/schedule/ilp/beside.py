"""A solver at work beside the constructive search, in a process of less priority.

``python -m megatron_pulse.planner.schedule.ilp.beside FOLDER`` reads the arguments of ``attempt``
from there, and writes what it returns. Both are pickles of one and the same program.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from megatron_pulse.files import replacing
from megatron_pulse.planner.schedule.ilp.attempt import LEAST_S, Attempt, attempt
from megatron_pulse.planner.schedule.ilp.solvers import Solver
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.processes import ending_with_us

GRACE_S = 0.2
"""Seconds after the end at which an answer is no longer waited for."""

NICE = 5
"""How nice the process is: on a core that both share it gets a third of what the search gets."""

QUESTION, ANSWER = "question.pickle", "answer.pickle"


class Beside:
    """An ``attempt`` from ``later`` on until ``deadline`` (of ``time.monotonic``); used as a
    context, at whose end its process ends."""

    def __init__(
        self, problem: ScheduleProblem, solver: Solver, later: float, deadline: float
    ) -> None:
        self.problem, self.solver, self.later, self.deadline = problem, solver, later, deadline
        self.folder = tempfile.TemporaryDirectory(prefix="pulse-beside-")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()  # with it ends the solver that it has started
            self.process.wait()
        self.folder.cleanup()

    def is_enough(self, schedule: Schedule, bound: float) -> bool:
        """Whether the attempt has ended with a proof; begins it with ``schedule`` when it is
        time."""
        now = time.monotonic()
        if self.process is not None:
            known = self.answer()
            return known is not None and known.length <= known.bound * (1 + 1e-9)
        if now >= self.later and self.deadline - now > LEAST_S:
            self._begin(schedule, bound)
        return False

    def wait(self) -> Attempt | None:
        """What came of it, at the deadline at the latest; None for nothing."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, self.deadline + GRACE_S - time.monotonic()))
        return self.answer()

    def answer(self) -> Attempt | None:
        """What came of it so far; None for nothing."""
        if self.process is None or self.process.poll() is None:
            return None
        path = Path(self.folder.name) / ANSWER
        if not path.exists():
            return None
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Attempt)
        return found

    def _begin(self, schedule: Schedule, bound: float) -> None:
        question = (self.problem, self.solver, self.deadline, schedule, bound)
        (Path(self.folder.name) / QUESTION).write_bytes(pickle.dumps(question))
        root = str(Path(__file__).parents[4])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            ending_with_us([sys.executable, "-P", "-m", __name__, self.folder.name]),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def main(folder: Path) -> None:
    """Answer the question in ``folder``."""
    os.nice(NICE)
    answer = attempt(*pickle.loads((folder / QUESTION).read_bytes()))
    with replacing(folder / ANSWER) as new:
        new.write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    from megatron_pulse.planner.schedule.ilp import beside  # what is pickled is of that name

    beside.main(Path(sys.argv[1]))
