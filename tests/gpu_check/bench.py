"""What checks work with: a folder, the device, commands, trainings."""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pulse.processes import ending_with_us
from tests.gpu_check.check import Figures, Machine
from tests.launch.sessions import BIN, ROOT


@dataclass
class Bench:
    """Where a check runs: ``folder`` is its own, ``figures`` what it has found so far, and
    ``last_seen`` what each rank of the newest training has."""

    folder: Path
    machine: Machine
    figures: Figures = field(default_factory=dict)
    last_seen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether there is one."""
        return self.machine.device == "cuda"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A table of the figures, to be filled."""
        rows: list[dict[str, Any]] = self.figures.setdefault(name, [])
        return rows

    def call(self, *words: str | Path, status: int = 0, **environment: str) -> str:
        """Run a command in the repository's root and show what it says; returns that.

        Raises RuntimeError if it ends with another status.
        """
        line = list(map(str, words))
        print(f"$ {shlex.join(line)}", flush=True)
        with subprocess.Popen(
            ending_with_us(line),
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            said = []
            for text in process.stdout:
                print(text, end="", flush=True)
                said.append(text)
        if process.returncode != status:
            last = next((text.strip() for text in reversed(said) if text.strip()), "nothing")
            raise RuntimeError(
                f"{shlex.join(line)[:200]} ended with status {process.returncode}, not {status}; "
                f"its last words: {last}"
            )
        return "".join(said)

    def pulse(self, *words: str | Path, status: int = 0, **environment: str) -> str:
        """A ``pulse`` command."""
        return self.call(BIN / "pulse", *words, status=status, **environment)

    def ranks(self, number: int, *words: str | Path, status: int = 0, **environment: str) -> str:
        """``tests.gpu_check.rank`` on that many ranks, under ``pulse run``.

        Sums of products are repeatable; on one GPU all ranks share it (see ``rank.take_gpu``).
        """
        own = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | environment
        command = "run", "--nproc-per-node", str(number), "-m", "tests.gpu_check.rank"
        return self.pulse(*command, *words, status=status, **own)

    def train(
        self,
        number: int,
        *flags: str,
        backbone: str = "uvit",
        name: str = "run",
        **environment: str,
    ) -> Any:
        """A training as ``tests.integration.runs`` does it, on this machine's device unless
        CUDA_VISIBLE_DEVICES is empty; returns its ``Run``."""
        from tests.integration.runs import BASE, TINY, Run, _whole

        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        words = [*TINY[backbone], *BASE, *flags]
        self.ranks(number, "train", folder, *words, **environment)
        results = [pickle.loads((folder / f"rank{r}").read_bytes()) for r in range(number)]
        kinds = ("weights", "main_params", "averages")
        wholes = [_whole([part for found in results for part in found[kind]]) for kind in kinds]
        last = results[-1]
        self.last_seen = results
        return Run(
            last["losses"], last["norms"], last["validation"], last["steps"], *wholes,
            results[0]["executed"],
        )  # fmt: skip

    def cases(self, number: int, cases: Sequence[tuple[str, Any]], name: str) -> list[Any]:
        """The outcome of every (family, ``tests.runtime.equality.Case``) on so many ranks."""
        from tests.runtime.equality import merge

        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "cases").write_bytes(pickle.dumps(list(cases)))
        self.ranks(number, "cases", folder, self.machine.device)
        ranks = [pickle.loads((folder / f"rank{r}").read_bytes()) for r in range(number)]
        return [merge([rank[i] for rank in ranks]) for i in range(len(cases))]
