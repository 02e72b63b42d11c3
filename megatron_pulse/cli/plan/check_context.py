"""Check of a plan's context parallelism against its backbone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pulse.errors import Faults
from megatron_pulse.format import in_mb
from megatron_pulse.profile.roofline import ELEMENT_BYTES

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.planner.plan_file.plan_file import PlanFile


def check_context(plan: PlanFile, backbone: Backbone) -> tuple[list[str], str]:
    """Faults of a plan in which several ranks share the tokens of ``backbone``, and the finding.

    The tokens must be divisible, and layers must exchange the bytes of the plan's costs.
    """
    from megatron_pulse.planner.tune.context_rank import context_costs
    from megatron_pulse.tracing.context_parallel.divided_backbone import traffic_of

    size = plan.context
    plans = [shape.plan for shape in plan.shapes] or [plan]
    faults: list[str] = []
    sent = 0.0
    for index, own in enumerate(plans):
        try:
            traffic = traffic_of(backbone, size, index, ELEMENT_BYTES[plan.dtype])
        except Faults as error:
            return [f"context {size}: {fault}" for fault in error.faults], ""
        sent = max(sent, sum(each.sent_per_rank(size, plan.tensor) for each in traffic))
        costs = context_costs(own.profile)
        found = {heads for each in traffic for heads in each.heads} or set(backbone.num_heads)
        if set(costs.heads) != found:
            faults.append(
                f"profile.context.heads is {list(costs.heads)}; attentions of {backbone.name} have "
                f"{sorted(found)}"
            )
        ring = costs.is_ring(size)
        for i, (layer, does) in enumerate(zip(costs.layers, traffic, strict=True)):
            attended = layer.ring_bytes if ring else layer.all_to_all_bytes
            said = attended, layer.gathered_bytes
            has = does.ring + does.all_to_all, does.gathered
            if said != has:
                faults.append(
                    f"profile.context.layers.{i} exchanges {said[0]:,} and gathers {said[1]:,} "
                    f"bytes; {does.layer!r} of {backbone.name} {has[0]:,} and {has[1]:,}"
                )
    return faults, f"{size} ranks share tokens; each sends {in_mb(sent)} a sample and forward pass"
