"""Solve one LP file with HiGHS, in a process of its own that can be killed.

``python highs_process.py MODEL.lp START.json ANSWER.json SECONDS THREADS``; START may hold ``null``
or the value of every column by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import highspy


def main(model: str, start: str, answer: str, seconds: str, threads: str) -> None:
    """Write status, dual bound and the values of all columns that are not zero to ``answer``."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", int(threads))
    highs.setOptionValue("time_limit", float(seconds))
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
