"""Table of ``pulse recipe --devices``: devices and memory that recipes need, by the planner."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_pulse.cli.output import table
from megatron_pulse.cli.plan.tuning import tune_command
from megatron_pulse.cli.plan.tuning.tune_input import choices_of, evaluator_of, given_profile
from megatron_pulse.errors import UserError, unknown_name
from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError, cluster
from megatron_pulse.planner.tune.tune import UntunableError, tune
from megatron_pulse.profile.profile import Profile
from megatron_pulse.progress import ProgressLine
from megatron_pulse.recipe.examples import (
    example_backbone,
    example_class,
    example_names,
    example_text,
    example_traced,
)

_SECONDS = 6.0
_MOST_DEVICES = 32
_BYTES = 10
"""Least bytes a parameter takes: bf16 weight and gradient, fp32 weight; Adam may be offloaded."""
_FROZEN_BYTES = 2  # or fewer if quantised
_NF4 = "nf4"


def device_table(clusters: Sequence[str], recipe: str | None = None) -> list[str]:
    """Lines of the table: for each recipe and cluster, the fewest devices that can train it.

    ``recipe`` names the only one; by default all.

    A recipe that suggests it has a row with its frozen weights in NF4 too. Batch and dtype are the
    recipe's. Text encoders and autoencoder come on top unless their outputs
    are stored before. Takes some seconds of tuning for each number of devices that is tried.
    """
    places = []
    for name in clusters:
        try:
            place = cluster(name.strip())
        except ClusterError as error:
            raise UserError(f"--devices: {error}") from error
        if place.mixed:
            raise UserError(
                f"--devices: {place.name} has unlike devices: give a cluster of one kind, or tune "
                "a recipe's backbone with 'pulse tune --cluster'"
            )
        places.append(place)
    planned = [name for name in example_names() if example_backbone(name) or example_traced(name)]
    if recipe is not None and recipe not in planned:
        raise UserError(unknown_name("recipe", recipe, planned))
    names: list[tuple[str, str | None]]
    names = [(name, None) for name in planned if recipe in (None, name)]
    names += [(name, _NF4) for name, _ in names if example_class(name)]
    rows = []
    with ProgressLine("planning", len(names) * len(places), "cells") as line:
        for name, quantization in sorted(names, key=lambda row: (row[0], row[1] or "")):
            cells, size = [], 0
            told = f"{name}, {quantization}" if quantization else name
            for place in places:
                line.note = f"{told} on {place.name}"
                profile, cell = _fewest(name, place, quantization)
                size = sum(layer.parameters for layer in profile.layers)
                cells.append(cell)
                line.advance()
            rows.append((told, f"{size / 1e6:.0f} M", *cells))
    titles = [f"{p.name} ({p.usable_bytes / 1e9:.3g} usable GB)" for p in places]
    return table([("recipe", "parameters", *titles), *rows], left=(0, *range(2, len(titles) + 2)))


def _fewest(name: str, place: Cluster, quantization: str | None) -> tuple[Profile, str]:
    """Profile of the recipe's backbone, and the cell of the table."""
    recipe = tomllib.loads(example_text(name))
    parser = argparse.ArgumentParser()
    tune_command.add_command(parser.add_subparsers())
    model = ["--backbone", str(example_backbone(name))]
    options: dict[str, object] = {}
    if (traced := example_traced(name)) is not None:
        model, options = ["--module", traced[0]], dict(traced[1])
    quantization = quantization or recipe.get("quantization", {}).get("type")
    if quantization:
        model = ["--module", str(example_class(name)), "--quantization", quantization]
    words = ["tune", "--cluster", place.name, *model]
    words += ["--global-batch-size", str(recipe["training"]["batch_size"])]
    for option, value in {**options, **recipe["model"].get("options", {})}.items():
        words += ["--option", f"{option}={value}"]
    for key, value in recipe.get("adapter", {}).items():
        words += [f"--adapter{'' if key == 'type' else f'-{key}'}", str(value)]
    args = parser.parse_args(words)
    profile = given_profile(args, place)
    trained = sum(layer.trained_parameters for layer in profile.layers)
    held = _FROZEN_BYTES * sum(layer.stored_parameters(_FROZEN_BYTES) for layer in profile.layers)
    if place.host is not None:  # frozen weights may be there
        held = _FROZEN_BYTES * trained
    least = (held + (_BYTES - _FROZEN_BYTES) * trained) / place.usable_bytes
    for part in _parts(place):
        if part.num_devices < least:
            continue
        evaluator = evaluator_of(args, profile, part)
        try:
            choices = replace(choices_of(args), fsdp=False)
            best = tune(evaluator, choices, _SECONDS, solver="none", keep=1).outcomes[0]
        except UntunableError:
            continue
        memory = max(best.memory_bytes) / 1e9
        return profile, f"{part.num_devices}: {memory:.3g} GB, {best.throughput:.3g} samples/s"
    return profile, f"more than {_MOST_DEVICES}"


def _parts(place: Cluster) -> Iterator[Cluster]:
    """1, 2, 4, ... devices: parts of one node, then whole nodes."""
    count = 1
    while count <= _MOST_DEVICES:
        one_node = place.part(min(count, place.devices_per_node))
        if count <= place.devices_per_node and one_node is not None:
            yield one_node
        elif count % place.devices_per_node == 0:
            yield replace(place, nodes=count // place.devices_per_node)
        count *= 2
