"""Report of what context parallelism divides of a chain and what its ranks send."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.output import table
from megatron_pulse.errors import Faults, format_faults
from megatron_pulse.format import in_mb, with_plural

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.tracing.context_parallel.divided_backbone import LayerTraffic


def context_report(backbone: Backbone, size: int) -> tuple[list[str], dict[str, Any]]:
    """Division of ``backbone`` over ``size`` ranks, or why it is refused: lines, and a record."""
    from megatron_pulse.tracing.context_parallel.divided_backbone import (
        first_division,
        kinds_of_attention,
        traffic_of,
    )

    title = f"context parallelism over {size} ranks"
    try:
        traffic = traffic_of(backbone, size)
    except Faults as error:
        lines = format_faults(f"{title} is refused", error.faults).splitlines()
        return lines, {"size": size, "refused": error.faults}
    name, length = first_division(backbone, size)
    sent = {each.layer: each.sent_per_rank(size) for each in traffic}
    backward = sum(each.sent_per_rank(size, backward=True) for each in traffic)
    kinds: dict[LayerTraffic, list[str]] = {}
    for each in traffic:
        if each.tokens or each.num_attentions or each.gathers:
            kinds.setdefault(replace(each, layer=""), []).append(each.layer)
    rows = [
        (
            first + (f" and {len(more)} more" if more else ""),
            " + ".join(map(str, does.tokens)),
            str(does.num_attentions - does.num_rings or ""),
            str(does.num_rings or ""),
            in_mb(sent[first]) if sent[first] else "",
            "; ".join(does.gathers),
        )
        for does, (first, *more) in kinds.items()
    ]
    titles = ("link", "hands on tokens", "all-to-alls", "rings", "a rank sends", "gathered for")
    lines = [
        f"{title}: divided from {name} on, {with_plural(length, 'token')}; a rank sends "
        f"{in_mb(sum(sent.values()))} a sample and forward pass, {in_mb(backward)} backward",
        *table([titles, *rows], left=(0, 1, 5)),
        f"{kinds_of_attention(traffic)}; a rank sends (K - 1) / K^2 of an attention's queries, "
        "keys, values and results, but (K - 1) / K of the keys and values of a ring (backward "
        "twice), and of what is gathered",
    ]
    record = {
        "size": size,
        "divided": name,
        "tokens": length,
        "links": [{**asdict(each), "sent": sent[each.layer]} for each in traffic],
    }
    return lines, record
