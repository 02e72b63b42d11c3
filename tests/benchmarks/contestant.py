"""What a contestant is, planned in one process and run in others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.bubble_fill.components import Component
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.schedule.check.validate import peak_activations
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.fsdp.step import Sharding
from tests.benchmarks.token_sharing import TIMEOUT_S as TIMEOUT_S
from tests.benchmarks.token_sharing import TokenSharing


class Engine(StrEnum):
    """Whose code runs a step."""

    OURS = "ours"
    MEGATRON_1F1B = "Megatron 1F1B"
    MEGATRON_INTERLEAVED = "Megatron interleaved"
    TORCH_1F1B = "torch 1F1B"
    TORCH_INTERLEAVED = "torch interleaved 1F1B"
    TORCH_ZBV = "torch ZBV"
    DEEPSPEED_1F1B = "DeepSpeed's 1F1B"
    DATA_PARALLEL = "Megatron DDP"
    STREAMED = "DDP, base streamed from the host"
    FSDP2 = "FSDP2"
    HSDP = "HSDP"


REPLICAS = (Engine.DATA_PARALLEL, Engine.STREAMED, Engine.FSDP2, Engine.HSDP)
"""Those whose devices run the whole backbone each."""

OF_ADAPTERS = (Engine.DEEPSPEED_1F1B, Engine.STREAMED)
"""Those that enter where an adapter is trained."""


@dataclass(frozen=True)
class Contestant:
    """A way to run a step, planned for one backbone and one bandwidth; all of it is emulated.

    ``packed`` are the fp32 elements of the one tensor that enters each stage (not ours); ``layers``
    of a data-parallel run are (forward seconds, backward seconds, gradient elements).
    ``saved_bytes`` are what each stage keeps of a microbatch, ``wgrad_bytes`` what of it stays from
    input gradient to weight gradient (none: all). ``state_bytes`` are parameters, gradients and
    optimizer of each device, ``working_bytes`` the working memory of its operations. All are of the
    real backbone. ``exchange`` sends shapes before tensors where they differ, else all are as large
    as the largest (Megatron interleaved). ``sharding`` is how FSDP2 and HSDP run their units, which
    are their ``layers``. ``way`` says in words how it
    runs where that was chosen, and ``micro_batch_size`` its microbatches' samples (0: as the
    backbone's). ``encoders`` run too, those that are no bubble tasks of the schedule in front of
    the step; ``backbone`` is run in the place of the others' (ours, relaying skips, or of other
    microbatches). ``sharing`` are ranks that share tokens (ours, FSDP2, HSDP).
    """

    name: str
    engine: Engine
    num_microbatches: int
    partition: Partition | None = None
    problem: ScheduleProblem | None = None
    schedule: Schedule | None = None
    packed: tuple[int, ...] = ()
    layers: tuple[tuple[float, float, int], ...] = ()
    exchange: bool = False
    solver: str = ""
    predicted_s: float = 0.0
    expected_bytes: int = 0
    saved_bytes: tuple[float, ...] = ()
    wgrad_bytes: tuple[float, ...] = ()
    state_bytes: tuple[float, ...] = ()
    working_bytes: tuple[float, ...] = ()
    way: str = ""
    micro_batch_size: int = 0
    sharding: Sharding | None = None
    encoders: Encoders | None = None
    backbone: Backbone | None = None
    sharing: TokenSharing | None = None

    def peak_memory(self, schedule: Schedule) -> tuple[float, ...]:
        """The most bytes of activations on each device, by this schedule."""
        waiting = self.wgrad_bytes or None
        return peak_activations(schedule, self.saved_bytes, wgrad_bytes=waiting)


@dataclass(frozen=True)
class Encoders:
    """Frozen components with emulated seconds (of one sample) and bytes, that take ``factor`` times
    as long as that; a step has ``num_samples``."""

    components: tuple[Component, ...]
    num_samples: int
    factor: float = 1.0

    @property
    def compute_s(self) -> float:
        """Of a step, over all ranks."""
        return self.factor * self.num_samples * sum(c.chain_s(1) for c in self.components)


@dataclass(frozen=True)
class Refused:
    """What does not run since its fullest device would need ``needs_bytes``, in the least ``way``
    where several were tried."""

    contestant: str
    engine: Engine
    way: str
    needs_bytes: float


@dataclass
class Runner:
    """``step()`` runs one step; ``sent_bytes()`` is the payload that its own count says it sent."""

    step: Callable[[], None]
    sent_bytes: Callable[[], int]
    held_bytes: Callable[[], float] = lambda: 0.0


def counted(
    step: Callable[[], None], each: int, held_bytes: Callable[[], float] = lambda: 0.0
) -> Runner:
    """Runner whose count of sent payload is ``each`` bytes a step."""
    total = 0

    def run() -> None:
        nonlocal total
        step()
        total += each

    return Runner(run, lambda: total, held_bytes)


@dataclass
class Held:
    """Saved activations of the real backbone that this rank would hold, and the most so far."""

    now: float = 0.0
    most: float = 0.0

    def add(self, num_bytes: float) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


@dataclass
class Groups:
    """All ranks as one pipeline: Megatron's groups, as its schedules take them."""

    collection: Any

    @staticmethod
    def join() -> Groups:
        """Collective."""
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules

        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
        return Groups(schedules._build_default_pg_collection())
