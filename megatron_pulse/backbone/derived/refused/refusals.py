"""Operations of an exported graph whose results would depend on the layout, each with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from megatron_pulse.backbone.derived.reading import (
    Reading,
    inner_graphs,
    operation,
    place_of,
)


def refusals(reading: Reading, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """What of a whole graph no pipeline could run; ``names`` has what it does not compute."""
    yield from _writes(reading, names)
    yield from _random(reading.calls)
    yield from _running(reading.calls)


def _writes(reading: Reading, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """Writes to what is not the call's own memory."""
    for memory, writers in reading.writers.items():
        if memory.op != "call_function":
            what = names.get(memory, memory.name)
            for writer in writers:
                yield (
                    f"{operation(writer)} writes to {what}, at {place_of(writer)}: a step must not "
                    "change what the module or its caller holds"
                )
    yield from _written_by_regions(reading)


def _written_by_regions(reading: Reading) -> Iterator[str]:
    for node in reading.order:  # what is given has users besides
        for inner in inner_graphs(node):
            inside = Reading(list(inner.nodes))
            for memory, writers in inside.writers.items():
                if memory.op == "placeholder":
                    yield (
                        f"{operation(writers[0])} writes to what {operation(node)} is given, at "
                        f"{place_of(writers[0])}: not possible in a region of autocast or no_grad"
                    )
            yield from _written_by_regions(inside)


def _random(nodes: list[fx.Node]) -> Iterator[str]:
    for node in nodes:
        for inner in inner_graphs(node):
            yield from _random([n for n in inner.nodes if n.op == "call_function"])
        tags = getattr(node.target, "tags", ())
        name = operation(node)
        if name.startswith("scaled_dot_product"):
            chance = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0)
            is_random = bool(chance)
        elif name.startswith("dropout."):
            is_random = True
        else:
            is_random = torch.Tag.nondeterministic_seeded in tags
        if is_random:
            yield (
                f"{name} is random, at {place_of(node)}: results would depend on the layout; set "
                "dropout to 0, or call eval()"
            )


def _running(nodes: list[fx.Node]) -> Iterator[str]:
    """Norms that update running statistics, which their schemas do not say."""
    for node in nodes:
        name = operation(node)
        if name.startswith(("batch_norm", "instance_norm")) and node.args[3] and node.args[5]:
            yield (
                f"{name} changes its running statistics, at {place_of(node)}: call eval() on it, "
                "or track none"
            )


def own_memory_faults(reading: Reading, home: Mapping[fx.Node, set[int]]) -> Iterator[str]:
    """Writes that would reach, or miss, what another unit holds; ``home`` says who has a node."""
    for memory, writers in reading.writers.items():
        for writer in writers:
            if not home.get(writer, set()) <= home.get(memory, set()):
                yield _parted(writer)
        last = max(reading.order[w] for w in writers)
        units = set().union(*(home.get(w, set()) for w in writers))
        for alias in (n for n, m in reading.memory.items() if m is memory):
            for user in reading.users.get(alias, ()):
                if reading.order[user] < last and not home.get(user, units) <= units:
                    yield _parted(user)


def _parted(node: fx.Node) -> str:
    return (
        f"{operation(node)}, at {place_of(node)}, shares memory with a value that another part of "
        "the chain writes in place"
    )
