"""Chains that are derived beside the same backbones' own: how long, how large, and how they cut.

    .venv/bin/python -m tests.benchmarks.derived [--only NAME] [--table TABLE.json]

Families that diffusers publishes, at full size without memory for weights: CPU seconds to derive
the chain, and what the process held at most; then the busiest device of an exact fold over 2, 4 and
8 V100s in half precision (roofline, one sample), beside the chain by hand. With
``--table``, a published table of the layers of a class of diffusers (its ``cls`` and ``config``)
takes the hand-written chain's place. "balance" is how many times the mean device the busiest is:
what a cut decides. (A table counts matrix products alone; and the operations of diffusers' modules
are not those of our families, one by one, and a derived chain has to have theirs, bit for bit: what
those of the class itself take is told beside both.) "same_costs_ms" leaves that out: the cuts found
on the derived chain beside those found on the other, both with what the other's layers take. Layers
are matched by the parameters they hold; what one of the other's takes is shared among the derived
layers that are parts of it as their own times are. "own_costs_ms" is the reverse: both cuts with
what the derived chain's layers take.
"""

from __future__ import annotations

import json
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from tests.benchmarks.report import Flags, Report, existing
from tests.benchmarks.setups import V100

FAMILIES = ("sdxl", "sd-v2.1", "hunyuan-dit-v1.2")
SIZES = (2, 4, 8)
WHATS = ("busiest_ms", "balance", "same_costs_ms", "own_costs_ms")
_LINK = Link(5e-6, 10e9)


_GOAL = Goal(collocate=True, link=_LINK)


def busiest(costs: ChainCosts, partition: Partition) -> tuple[float, float]:
    """Milliseconds of the busiest device, and how many times the mean that is."""
    load = _GOAL.evaluate(costs, partition).load_s
    return 1e3 * max(load), max(load) * len(load) / sum(load)


def with_times_of(
    hand: ChainCosts, chain: ChainCosts, homes: Sequence[Sequence[int]]
) -> ChainCosts:
    """A derived ``chain`` whose layers take together what those of ``hand`` do; ``homes`` says in
    which of these the parameters of each derived layer are."""
    parts = [
        [i for i, home in enumerate(homes) if which in home] for which in range(len(hand.names))
    ]
    lost = [name for name, own in zip(hand.names, parts, strict=True) if not own]
    assert not lost, f"no derived layer has parameters of {lost}"

    def shared(times: Sequence[float], own_times: Sequence[float]) -> tuple[float, ...]:
        found = [0.0] * len(homes)
        for seconds, own in zip(times, parts, strict=True):
            whole = sum(own_times[i] for i in own)
            for i in own:
                found[i] += seconds * own_times[i] / whole
        return tuple(found)

    return replace(
        chain,
        forward_s=shared(hand.forward_s, chain.forward_s),
        backward_s=shared(hand.backward_s, chain.backward_s),
    )


def of_parts(by_hand: Partition, homes: Sequence[Sequence[int]]) -> Partition:
    """The cuts of another chain where the derived one has them."""
    first = list(accumulate((min(home) for home in homes), max))
    return Partition(by_hand.placement, tuple(bisect_left(first, cut) for cut in by_hand.cuts))


def homes_in(backbone: Backbone, home: Callable[[str], int]) -> list[list[int]]:
    """``home`` of the parameters of each layer of a derived chain."""
    from megatron_pulse.tracing.from_module import source_of

    source = source_of(backbone)
    assert source is not None
    return [[home(name) for name in unit.weights] for unit in source.chains.first.units]


def published_homes(hand: Backbone) -> dict[str, int]:
    """In which layer of a family's chain each of the published parameters is."""
    from megatron_pulse.backbone.published_weights import to_published
    from megatron_pulse.profile.parameters import meta_weights
    from model_specs import published_form

    form, weights = published_form(hand), meta_weights(hand)
    assert form is not None
    found = {}
    for i, layer in enumerate(hand.layers):
        own = {name: weight for name, weight in weights.items() if name.startswith(layer.prefix)}
        found |= dict.fromkeys(to_published(form, own), i)
    return found


def costs_of(backbone: Backbone) -> ChainCosts:
    """Analytic costs of one sample."""
    from megatron_pulse.profile.analytic import analyse

    return analyse(backbone, [1], V100).at(1)


def derived(class_name: str, config: dict[str, Any], options: dict[str, Any]) -> Backbone:
    """The chain that is derived of a class with a config."""
    from model_specs import load_backbone

    settings = {key: value for key, value in config.items() if key[0] != "_"}
    chosen = {**settings, **options, "dtype": V100.dtype}
    return load_backbone(f"diffusers:{class_name}", chosen)


def eager_s(class_name: str, config: dict[str, Any], sizes: dict[str, Any]) -> float:
    """What the operations of the class itself take, called as it is, forward and backward."""
    import diffusers
    import torch
    from torch.utils import _pytree as pytree

    from megatron_pulse.profile.flops import FlashAttention
    from megatron_pulse.profile.measurement.record_kernels import Kernels
    from model_specs.derived.classes import CLASSES

    kind, kernels = getattr(diffusers, class_name), Kernels()
    with torch.device("meta"):
        module = kind.from_config(config).to(getattr(torch, V100.dtype))
        given = CLASSES[class_name].declared(module.config, sizes).make(V100.dtype)(1)
        given = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
        with FlashAttention(), kernels, kernels.record() as called:
            predicted = module(**given).sample
            predicted.backward(torch.empty_like(predicted))
    return V100.seconds(called)


def beside_family(name: str) -> Iterator[dict[str, Any]]:
    """A family's chain beside the derived one."""
    from model_specs import load_backbone, published_form

    hand = load_backbone(name)
    form = published_form(hand)
    assert form is not None
    side = hand.input_spec.shape[-1]
    sizes = {"height": side, "width": side}
    start = time.process_time()
    chain = derived(form.class_name, dict(form.config), sizes)
    first = _first(name, start, (len(hand.layers), len(hand.skips)), chain)
    costs = costs_of(hand), costs_of(chain)
    by_hand, ours = (1e3 * (sum(each.forward_s) + sum(each.backward_s)) for each in costs)
    eager = 1e3 * eager_s(form.class_name, dict(form.config), sizes)
    yield first | {
        "all layers, ms": (by_hand, ours), "% more": 100 * (ours / by_hand - 1),
        "the class itself, ms": eager, "% more than that": 100 * (ours / eager - 1),
    }  # fmt: skip
    home = published_homes(hand)
    yield from _cuts(*costs, homes_in(chain, home.__getitem__), WHATS)


def beside_table(path: Path) -> Iterator[dict[str, Any]]:
    """A table's chain beside the derived one."""
    from megatron_pulse.profile.profile_from_table import read_table

    table = json.loads(path.read_text())
    frames, _, height, width = table["latent"]
    sizes = {"frames": frames, "height": height, "width": width}
    start = time.process_time()
    chain = derived(table["cls"].rpartition(".")[2], table["config"], sizes)
    profile = read_table(path, V100)
    yield _first(table["name"], start, (len(profile.layers), len(profile.skips)), chain)
    parts = [tuple(f"{name}." for name in unit["modules"]) for unit in table["units"]]

    def home(name: str) -> int:
        return next((i for i, part in enumerate(parts) if name.startswith(part)), 0)

    yield from _cuts(profile.at(1), costs_of(chain), homes_in(chain, home), WHATS[1:])


def _first(name: str, start: float, hand: tuple[int, int], chain: Backbone) -> dict[str, Any]:
    return {
        "name": name,
        "derived in s": time.process_time() - start,
        "process GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "layers": (hand[0], len(chain.layers)),
        "skips": (hand[1], len(chain.skips)),
    }


def _cuts(
    hand: ChainCosts, chain: ChainCosts, homes: Sequence[Sequence[int]], whats: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The hand-written chain's figure and the derived one's, by size."""
    as_hand = with_times_of(hand, chain, homes)
    for size in SIZES:
        by_hand, ours = (find_partition(costs, fold(size), _GOAL) for costs in (hand, chain))
        a, b = busiest(hand, by_hand), busiest(chain, ours)
        same = a[0], busiest(as_hand, ours)[0]
        own = busiest(chain, of_parts(by_hand, homes))[0], b[0]
        pairs = dict(zip(WHATS, ((a[0], b[0]), (a[1], b[1]), same, own), strict=True))
        for what in whats:
            first, second = pairs[what]
            yield {"P": size, "what": what, "by hand": first, "derived": second,
                   "% more": 100 * (second / first - 1)}  # fmt: skip


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--only", [], action="append", choices=FAMILIES)
    flags.add("--table", type=existing)
    args = flags.parse_args()
    prepare_megatron()
    report = Report(args.json)
    asked = [beside_table(args.table)] if args.table else map(beside_family, args.only or FAMILIES)
    for rows in asked:
        for row in rows:
            report.add(row)


if __name__ == "__main__":
    main()
