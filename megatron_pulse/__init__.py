"""Skip-aware pipeline parallelism for diffusion backbones on Megatron-Core.

The public names for a custom program: describe a chain, partition it, schedule it, run it. Each
name is imported on first use. Planning needs no torch; running needs only the Megatron modules of
the layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_pulse.backbone.activations import ActivationPolicies as ActivationPolicies
    from megatron_pulse.backbone.cascade import cascade as cascade
    from megatron_pulse.backbone.chain import Backbone as Backbone
    from megatron_pulse.backbone.chain import Layer as Layer
    from megatron_pulse.backbone.chain import TensorSpec as TensorSpec
    from megatron_pulse.backbone.check import check_backbone as check_backbone
    from megatron_pulse.backbone.costs import ChainCosts as ChainCosts
    from megatron_pulse.backbone.costs import SkipCost as SkipCost
    from megatron_pulse.backbone.costs import weighted_costs as weighted_costs
    from megatron_pulse.backbone.simple_chain import chain as chain
    from megatron_pulse.planner.cluster.cluster import Link as Link
    from megatron_pulse.planner.layout.placement import Partition as Partition
    from megatron_pulse.planner.layout.placement import fold as fold
    from megatron_pulse.planner.layout.placement import interleaved as interleaved
    from megatron_pulse.planner.layout.placement import opposite as opposite
    from megatron_pulse.planner.layout.placement import sequential as sequential
    from megatron_pulse.planner.partition.evaluate import MemoryRule as MemoryRule
    from megatron_pulse.planner.partition.find import Goal as Goal
    from megatron_pulse.planner.partition.find import find_partition as find_partition
    from megatron_pulse.planner.program.make_plan import make_plan as make_plan
    from megatron_pulse.planner.program.plan import Plan as Plan
    from megatron_pulse.planner.schedule.bound.bounds import lower_bound as lower_bound
    from megatron_pulse.planner.schedule.operations import Schedule as Schedule
    from megatron_pulse.planner.schedule.problem import Certificate as Certificate
    from megatron_pulse.planner.schedule.problem import ScheduleProblem as ScheduleProblem
    from megatron_pulse.planner.schedule.solve import solve as solve
    from megatron_pulse.profile.measurement.measure import measure as measure
    from megatron_pulse.profile.trainable import choose_trained as choose_trained
    from megatron_pulse.runtime.pipeline import Pipeline as Pipeline
    from megatron_pulse.tracing.from_module import from_module as from_module

_NAMES = {
    "megatron_pulse.backbone.activations": ("ActivationPolicies",),
    "megatron_pulse.backbone.cascade": ("cascade",),
    "megatron_pulse.backbone.chain": ("Backbone", "Layer", "TensorSpec"),
    "megatron_pulse.backbone.check": ("check_backbone",),
    "megatron_pulse.backbone.costs": ("ChainCosts", "SkipCost", "weighted_costs"),
    "megatron_pulse.tracing.from_module": ("from_module",),
    "megatron_pulse.backbone.simple_chain": ("chain",),
    "megatron_pulse.profile.measurement.measure": ("measure",),
    "megatron_pulse.profile.trainable": ("choose_trained",),
    "megatron_pulse.planner.cluster.cluster": ("Link",),
    "megatron_pulse.planner.layout.placement": (
        "Partition",
        "fold",
        "interleaved",
        "opposite",
        "sequential",
    ),
    "megatron_pulse.planner.partition.evaluate": ("MemoryRule",),
    "megatron_pulse.planner.partition.find": ("Goal", "find_partition"),
    "megatron_pulse.planner.program.make_plan": ("make_plan",),
    "megatron_pulse.planner.program.plan": ("Plan",),
    "megatron_pulse.planner.schedule.bound.bounds": ("lower_bound",),
    "megatron_pulse.planner.schedule.operations": ("Schedule",),
    "megatron_pulse.planner.schedule.problem": ("Certificate", "ScheduleProblem"),
    "megatron_pulse.planner.schedule.solve": ("solve",),
    "megatron_pulse.runtime.pipeline": ("Pipeline",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
