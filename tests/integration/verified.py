"""Plans to verify, and ranks that stay to run one job after another, with faults of the runtime."""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.verify.job import VerifyJob
from megatron_pulse.integration.verify.layout_rank import run_rank
from megatron_pulse.planner.cluster.cluster import cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.roofline import PRESETS, Roofline
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from tests.ranks import run_ranks

_LOOK_S = 0.02
"""Seconds that ranks sleep between two looks for a job."""
MODULE = textwrap.dedent(
    """
    import torch
    from torch import nn


    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.time, self.last = nn.Linear(1, 4), nn.Conv2d(8, 1, 3, padding=1)

        def forward(self, x, t):
            skip = torch.relu(self.first(x) + self.time(t[:, None].to(x.dtype))[..., None, None])
            deep = torch.relu(self.second(skip))
            return self.last(torch.cat([deep, skip], 1))


    def build():
        return Small(), lambda size: {"x": torch.randn(size, 1, 8, 8), "t": torch.rand(size)}, {
            "sample": "x", "timestep": "t"
        }
    """
)
"""A module of one's own, with a skip and an embedder."""


def plan_for(
    backbone: Backbone,
    layout: str = "fold",
    *,
    pipeline: int = 2,
    data: int = 1,
    tensor: int = 1,
    microbatches: int = 3,
    split: bool = False,
    dtype: str = "float32",
    recompute: Recompute = Recompute.NEVER,
    sequence_parallel: bool = False,
) -> PlanFile:
    """A plan of one-sample microbatches, by a GPU's peaks."""
    profile = analyse(backbone, [1], Roofline(PRESETS["A100-80GB"], dtype), running=RUNNING)
    machine = replace(cluster("cpu"), devices_per_node=pipeline * data * tensor)
    kind = WHOLE if pipeline == 1 else FOLD_EXACT if layout == "fold" else ROW
    config = Config(pipeline, data, tensor, 1, kind, split, recompute=recompute)
    evaluator = Evaluator(
        profile, machine, microbatches * data, sequence_parallel=sequence_parallel
    )
    problem = evaluator.problem(config, microbatches)
    return plan_of(evaluator.evaluate(config, synthesize(problem, effort=2)), evaluator)


class RanksThatStay:
    """``world`` ranks that run jobs until the end; ``faults`` are ways to break them, by name."""

    def __init__(self, folder: Path, world: int, broken: Callable[[str], Any]) -> None:
        self._folder, self._count, self._end = folder, 0, folder / "end"
        self._failure: list[BaseException] = []
        self.fault = ""

        def serve() -> None:
            try:
                run_ranks(world, _serve, folder, broken, timeout_s=900.0)  # of all tests of a file
            except BaseException as error:
                self._failure.append(error)

        self._thread = threading.Thread(target=serve)
        self._world = world
        self._thread.start()

    def __call__(self, job: VerifyJob, given: PlanFile, deadline: float, progress: Any) -> None:
        """As ``verify`` calls what runs a layout."""
        job.save()
        number, self._count = self._count, self._count + 1
        told = self._folder / f"job_{number}"
        told.with_suffix(".new").write_text(f"{job.folder}\n{self.fault}")
        told.with_suffix(".new").rename(told)
        done = [self._folder / f"done_{number}_{rank}" for rank in range(self._world)]
        while not all(path.exists() for path in done):
            if self._failure:
                raise self._failure[0]
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Let the ranks end."""
        self._end.touch()
        self._thread.join()
        assert not self._failure, self._failure


def _serve(folder: Path, broken: Callable[[str], Any]) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    number = 0
    while True:
        told = folder / f"job_{number}"
        while not told.exists():
            if (folder / "end").exists():
                return
            time.sleep(_LOOK_S)
        where, fault = told.read_text().split("\n")
        with broken(fault):
            run_rank(VerifyJob.load(Path(where)))
        parallel_state.destroy_model_parallel()  # the next job may have another layout
        (folder / f"done_{number}_{os.environ['RANK']}").touch()
        number += 1
