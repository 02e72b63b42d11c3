"""What a check is, what it needs, and what became of it. Imports nothing that is slow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

type Row = Mapping[str, Any]
type Figures = dict[str, Any]
"""What was found: by name a number, a text, or a list of rows, which is shown as a table."""


class Need(StrEnum):
    """What a check cannot do without; on CPU two ranks are always there, over gloo."""

    NOTHING = "nothing"
    GPU = "a GPU"
    TWO_RANKS = "two ranks"
    TWO_RANKS_ON_GPUS = "two ranks on GPUs"


class Verdict(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    TIMED_OUT = "timed out"


class Skipped(Exception):
    """Raised by a check that cannot be run here; says why."""


@dataclass(frozen=True)
class Check:
    """``module:function`` under a name; ``why`` is one line, ``limit_s`` its seconds at most."""

    name: str
    function: str
    why: str
    need: Need = Need.NOTHING
    limit_s: float = 300.0


@dataclass(frozen=True)
class Machine:
    """What is here: ``gpus`` by name, whether NCCL takes two ranks on one GPU, versions."""

    gpus: tuple[str, ...] = ()
    shares_gpu: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        """For ``parse``."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Machine:
        """Of a ``to_text``."""
        found = json.loads(text)
        return Machine(**{**found, "gpus": tuple(found["gpus"])})

    @property
    def device(self) -> str:
        """As torch calls it."""
        return "cuda" if self.gpus else "cpu"

    def most_ranks(self) -> int:
        """Ranks that a check may have."""
        return 4 if not self.gpus or self.shares_gpu else min(len(self.gpus), 4)

    def lacks(self, need: Need) -> str:
        """Why a check with this need is skipped, or nothing."""
        if need in (Need.GPU, Need.TWO_RANKS_ON_GPUS) and not self.gpus:
            return "needs a GPU, and torch finds none"
        if need in (Need.TWO_RANKS, Need.TWO_RANKS_ON_GPUS) and self.most_ranks() < 2:
            return (
                "needs two GPUs, or NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 for two "
                f"ranks on one; there is one, and NCCL {self.versions.get('nccl', 'is missing')}"
            )
        return ""


@dataclass(frozen=True)
class Result:
    """A check's verdict, why (skipped, failed), its seconds, what it found, how its output ends;
    ``earlier``: of a run before this one, with the same report."""

    name: str
    why: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    output: Sequence[str] = ()
    earlier: bool = False
