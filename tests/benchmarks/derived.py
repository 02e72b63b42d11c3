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

import argparse
import json
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition

FAMILIES = ("sdxl", "sd-v2.1", "hunyuan-dit-v1.2")
SIZES = (2, 4, 8)
DEVICE, DTYPE = "V100-32GB", "float16"
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
    from megatron_pulse.profile.roofline import PRESETS, Roofline

    return analyse(backbone, [1], Roofline(PRESETS[DEVICE], DTYPE)).at(1)


def derived(class_name: str, config: dict[str, Any], options: dict[str, Any]) -> Backbone:
    """The chain that is derived of a class with a config."""
    from model_specs import load_backbone

    settings = {key: value for key, value in config.items() if key[0] != "_"}
    chosen = {**settings, **options, "dtype": DTYPE}
    return load_backbone(f"diffusers:{class_name}", chosen)


def eager_s(class_name: str, config: dict[str, Any], sizes: dict[str, Any]) -> float:
    """What the operations of the class itself take, called as it is, forward and backward."""
    import diffusers
    import torch
    from torch.utils import _pytree as pytree

    from megatron_pulse.profile.flops import FlashAttention
    from megatron_pulse.profile.measurement.record_kernels import Kernels
    from megatron_pulse.profile.roofline import PRESETS, Roofline
    from model_specs.derived.classes import CLASSES

    kind, kernels = getattr(diffusers, class_name), Kernels()
    with torch.device("meta"):
        module = kind.from_config(config).to(getattr(torch, DTYPE))
        given = CLASSES[class_name].declared(module.config, sizes).make(DTYPE)(1)
        given = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
        with FlashAttention(), kernels, kernels.record() as called:
            predicted = module(**given).sample
            predicted.backward(torch.empty_like(predicted))
    return Roofline(PRESETS[DEVICE], DTYPE).seconds(called)


def beside_family(name: str) -> dict[str, Any]:
    """A family's chain beside the derived one."""
    from model_specs import load_backbone, published_form

    hand = load_backbone(name)
    form = published_form(hand)
    assert form is not None
    side = hand.input_spec.shape[-1]
    start = time.process_time()
    sizes = {"height": side, "width": side}
    chain = derived(form.class_name, dict(form.config), sizes)
    seconds = time.process_time() - start
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    costs = costs_of(hand), costs_of(chain)
    home = published_homes(hand)
    return {
        "name": name,
        "all_ms": (
            *(1e3 * (sum(each.forward_s) + sum(each.backward_s)) for each in costs),
            1e3 * eager_s(form.class_name, dict(form.config), sizes),
        ),
        "seconds": seconds,
        "gigabytes": held,
        "layers": (len(hand.layers), len(chain.layers)),
        "skips": (len(hand.skips), len(chain.skips)),
        **_rows(*costs, homes_in(chain, home.__getitem__)),
    }


def beside_table(path: Path) -> dict[str, Any]:
    """A table's chain beside the derived one."""
    from megatron_pulse.profile.profile_from_table import read_table
    from megatron_pulse.profile.roofline import PRESETS, Roofline

    table = json.loads(path.read_text())
    frames, _, height, width = table["latent"]
    start = time.process_time()
    sizes = {"frames": frames, "height": height, "width": width}
    chain = derived(table["cls"].rpartition(".")[2], table["config"], sizes)
    seconds = time.process_time() - start
    profile = read_table(path, Roofline(PRESETS[DEVICE], DTYPE))
    parts = [tuple(f"{name}." for name in unit["modules"]) for unit in table["units"]]

    def home(name: str) -> int:
        return next((i for i, part in enumerate(parts) if name.startswith(part)), 0)

    rows = _rows(profile.at(1), costs_of(chain), homes_in(chain, home))
    return {
        "name": table["name"],
        "seconds": seconds,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "layers": (len(profile.layers), len(chain.layers)),
        "skips": (len(profile.skips), len(chain.skips)),
        "balance": rows["balance"],
        "same_costs_ms": rows["same_costs_ms"],
        "own_costs_ms": rows["own_costs_ms"],
    }


def _rows(
    hand: ChainCosts, chain: ChainCosts, homes: Sequence[Sequence[int]]
) -> dict[str, dict[int, tuple[float, float]]]:
    found: dict[str, dict[int, tuple[float, float]]] = {}
    as_hand = with_times_of(hand, chain, homes)
    for size in SIZES:
        by_hand, ours = (find_partition(costs, fold(size), _GOAL) for costs in (hand, chain))
        a, b = busiest(hand, by_hand), busiest(chain, ours)
        for what, values in (
            ("busiest_ms", (a[0], b[0])),
            ("balance", (a[1], b[1])),
            ("same_costs_ms", (a[0], busiest(as_hand, ours)[0])),
            ("own_costs_ms", (busiest(chain, of_parts(by_hand, homes))[0], b[0])),
        ):
            found.setdefault(what, {})[size] = values
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=FAMILIES, default=[])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from megatron_pulse.cli.import_megatron import prepare_megatron

    prepare_megatron()
    if args.table:
        found = [beside_table(args.table)]
    else:
        found = [beside_family(name) for name in args.only or FAMILIES]
    if args.json:
        print(json.dumps(found))
        return
    for row in found:
        print(
            f"{row['name']}: derived in {row['seconds']:.1f} s, process {row['gigabytes']:.2f} GB; "
            f"layers {row['layers'][0]} and {row['layers'][1]}, skips {row['skips'][0]} and "
            f"{row['skips'][1]}"
        )
        if "all_ms" in row:
            by_hand, ours, eager = row["all_ms"]
            print(
                f"  all layers: {by_hand:.1f} and {ours:.1f} ms ({ours / by_hand - 1:+.1%}); the "
                f"class itself, called as it is: {eager:.1f} ({ours / eager - 1:+.1%})"
            )
        for what in ("busiest_ms", "balance", "same_costs_ms", "own_costs_ms"):
            for size, (hand, ours) in row.get(what, {}).items():
                print(f"  P = {size}: {what} {hand:.4g} and {ours:.4g} ({ours / hand - 1:+.1%})")


if __name__ == "__main__":
    main()
