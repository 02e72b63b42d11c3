"""Chains that are derived beside the same backbones' own: how long, how large, and how they cut.

    .venv/bin/python -m tests.benchmarks.derived [--only NAME] [--table TABLE.json]

Families that diffusers publishes, at full size without memory for weights: CPU seconds to derive
the chain, and what the process held at most; then the busiest device of an exact fold over 2, 4 and
8 V100s in half precision (roofline, one sample), beside the chain by hand. With
``--table``, a published table of the layers of a class of diffusers (its ``cls`` and ``config``)
takes the hand-written chain's place. "balance" is how many times the mean device the busiest is:
what a cut decides. (A table counts matrix products alone; and the operations of diffusers' modules
are not those of our families, one by one, and a derived chain has to have theirs, bit for bit: what
those of the class itself take is told beside both.)
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.partition.find import Goal, find_partition

FAMILIES = ("sdxl", "sd-v2.1", "hunyuan-dit-v1.2")
SIZES = (2, 4, 8)
DEVICE, DTYPE = "V100-32GB", "float16"
_LINK = Link(5e-6, 10e9)


def busiest(costs: ChainCosts, num_devices: int) -> tuple[float, float]:
    """Seconds of the busiest device of an exact fold, and how many times the mean that is."""
    goal = Goal(collocate=True, link=_LINK)
    load = goal.evaluate(costs, find_partition(costs, fold(num_devices), goal)).load_s
    return max(load), max(load) * len(load) / sum(load)


def costs_of(backbone: Backbone) -> ChainCosts:
    """Analytic costs of one sample."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.profile.devices import PRESETS, Roofline

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

    from megatron_pulse.profile.devices import PRESETS, Roofline
    from megatron_pulse.profile.flops import FlashAttention
    from megatron_pulse.profile.measuring.kernels import Kernels
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
        **_rows(*costs),
    }


def beside_table(path: Path) -> dict[str, Any]:
    """A table's chain beside the derived one."""
    from megatron_pulse.profile.devices import PRESETS, Roofline
    from megatron_pulse.profile.table import read_table

    table = json.loads(path.read_text())
    frames, _, height, width = table["latent"]
    start = time.process_time()
    sizes = {"frames": frames, "height": height, "width": width}
    chain = derived(table["cls"].rpartition(".")[2], table["config"], sizes)
    seconds = time.process_time() - start
    profile = read_table(path, Roofline(PRESETS[DEVICE], DTYPE))
    return {
        "name": table["name"],
        "seconds": seconds,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "layers": (len(profile.layers), len(chain.layers)),
        "skips": (len(profile.skips), len(chain.skips)),
        "balance": _rows(profile.at(1), costs_of(chain))["balance"],
    }


def _rows(hand: ChainCosts, chain: ChainCosts) -> dict[str, dict[int, tuple[float, float]]]:
    found = {size: (busiest(hand, size), busiest(chain, size)) for size in SIZES}
    return {
        "busiest_ms": {size: (1e3 * a[0], 1e3 * b[0]) for size, (a, b) in found.items()},
        "balance": {size: (a[1], b[1]) for size, (a, b) in found.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=FAMILIES, default=[])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from megatron_pulse.cli.megatron import prepare_megatron

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
        for what in ("busiest_ms", "balance"):
            for size, (hand, ours) in row.get(what, {}).items():
                print(f"  P = {size}: {what} {hand:.4g} and {ours:.4g} ({ours / hand - 1:+.1%})")


if __name__ == "__main__":
    main()
