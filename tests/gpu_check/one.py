"""Runs one check in this process and writes what became of it:

    python -m tests.gpu_check.one MODULE:FUNCTION FOLDER

It is called by the runner, which says in PULSE_CHECK_MACHINE what is there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Skipped
from tests.gpu_check.runner import machine_of


def main(function: str, folder: Path) -> int:
    """Status 0 where the check passed or was skipped."""
    module, _, name = function.partition(":")
    bench = Bench(folder, machine_of(os.environ["PULSE_CHECK_MACHINE"]))
    found: dict[str, Any] = {}
    try:
        found["figures"] = getattr(importlib.import_module(module), name)(bench) or {}
    except Skipped as why:
        found |= {"skipped": True, "reason": str(why)}
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        found |= {"failed": True, "reason": f"{type(error).__name__}: {first}"[:500]}
    found.setdefault("figures", bench.figures)
    with replacing(folder / "result.json") as beside:
        beside.write_text(json.dumps(found, default=str) + "\n")
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
