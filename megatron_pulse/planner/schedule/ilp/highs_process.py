"""Solve one LP file with HiGHS, in a process of its own that can be killed.

``python highs_process.py MODEL.lp START.json ANSWER.json SECONDS LATE_S THREADS``; START may hold
``null`` or the value of every column by name. HiGHS ends after SECONDS of this process's time, so
that its answer does not depend on the machine's load, and after LATE_S of wall-clock time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import highspy


def main(model: str, start: str, answer: str, seconds: str, late_s: str, threads: str) -> None:
    """Write status, dual bound and the values of all columns that are not zero to ``answer``."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", int(threads))
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("time_limit", float(late_s))

    def look(kind: Any, message: str, known: Any, wanted: Any, data: Any) -> None:
        if time.process_time() >= float(seconds):
            wanted.user_interrupt = True

    highs.setCallback(look, None)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    highs.readModel(model)
    names = list(highs.getLp().col_names_)
    if known := json.loads(Path(start).read_text()):
        solution = highspy.HighsSolution()
        solution.col_value = [known.get(name, 0.0) for name in names]
        solution.value_valid = True
        highs.setSolution(solution)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = highs.getSolution().col_value if found else []
    result = {
        "status": highs.modelStatusToString(status).lower(),
        "bound": info.mip_dual_bound,
        "values": {n: v for n, v in zip(names, values, strict=False) if v} if found else None,
    }
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
