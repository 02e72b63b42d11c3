"""Solver process that runs beside the constructive search, with lower priority.

``python -m megatron_pulse.planner.schedule.ilp.background FOLDER`` reads the arguments of
``attempt`` from the folder, and writes the result there. Both are pickles of the same version of
the code.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from megatron_pulse.files import replacing
from megatron_pulse.planner.schedule.ilp.improve_by_solver import LEAST_S, Attempt, attempt
from megatron_pulse.planner.schedule.ilp.solvers import LATE, Solver
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.processes import ending_with_us

GRACE_S = 5.0
"""Seconds of the wall clock, beside ``LATE`` times its own, after which an answer is no longer
waited for."""

NICE = 5
"""How nice the process is: on a core that both share it gets a third of what the search gets."""

QUESTION, ANSWER = "question.pickle", "answer.pickle"


class BackgroundSolver:
    """An ``attempt`` of ``seconds`` that begins once this process has spent ``later_s`` more; all
    are of the processor. Used as a context, at whose end its process ends.

    The result does not depend on its speed beside the search: once the process has begun, the
    search ends with its own proof, or waits for the process.
    """

    def __init__(
        self, problem: ScheduleProblem, solver: Solver, later_s: float, seconds: float
    ) -> None:
        self.problem, self.solver, self.seconds = problem, solver, seconds
        self.later = time.process_time() + later_s
        self.late = False
        self.folder = tempfile.TemporaryDirectory(prefix="pulse-beside-")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BackgroundSolver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()  # its solver ends with it
            self.process.wait()
        self.folder.cleanup()

    def is_enough(self, schedule: Schedule, bound: float) -> bool:
        """True if the attempt has ended with a proof; begins it with ``schedule`` when it is
        time."""
        if self.process is not None:
            known = self.answer()
            return known is not None and known.proved
        if time.process_time() >= self.later and self.seconds > LEAST_S:
            self._begin(schedule, bound)
        return False

    def wait(self) -> Attempt | None:
        """Result at its end, or when the wall clock is ``late``; None if there is none."""
        if self.process is not None:
            until = self.began + LATE * self.seconds + GRACE_S
            try:
                self.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.late = True
        return self.answer()

    def answer(self) -> Attempt | None:
        """Result so far; None if there is none."""
        if self.process is None or self.process.poll() is None:
            return None
        path = Path(self.folder.name) / ANSWER
        if not path.exists():
            return None
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Attempt)
        return found

    def _begin(self, schedule: Schedule, bound: float) -> None:
        self.began = time.monotonic()
        question = (self.problem, self.solver, self.seconds, schedule, bound)
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
    from megatron_pulse.planner.schedule.ilp import background  # the name that pickles refer to

    background.main(Path(sys.argv[1]))
