"""Operations of an exported graph with layout-dependent results, reported with source lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

from megatron_pulse.tracing.graph_analysis import (
    GraphAnalysis,
    argument,
    given_to,
    inner_graphs,
    operation,
    path_of,
    place_of,
    regions,
)


def refusals(reading: GraphAnalysis, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """Faults of a whole graph; ``names`` labels the nodes that the graph does not compute."""
    norms = list(_running(reading.calls))
    yield from _writes(reading, names, {path_of(node) for node in norms})
    yield from _random(reading.calls)
    for node in norms:
        yield (
            f"{operation(node)} updates running statistics, at {place_of(node)}. Call eval() on "
            "the module, or set track_running_stats=False"
        )
    yield from _untraced(reading.calls)


def _writes(
    reading: GraphAnalysis, names: Mapping[fx.Node, str], norms: Collection[str]
) -> Iterator[str]:
    """Faults for writes to memory outside the call.

    Batch counts of ``norms`` are excluded, because norms are refused anyway.
    """
    for memory, writers in reading.writers.items():
        if memory.op != "call_function":
            what = names.get(memory, memory.name)
            if not (what.endswith(_COUNT) and what.removesuffix(_COUNT) in norms):
                yield from (_changes(writer, what) for writer in writers)
    yield from _written_by_regions(reading, names)


_COUNT = ".num_batches_tracked"


def _changes(writer: fx.Node, what: str) -> str:
    fault = (
        f"{operation(writer)} writes to {what}, at {place_of(writer)}. A forward pass must not "
        "modify tensors of the module or its caller"
    )
    part, within, _ = what.rpartition(".parametrizations.")
    if not within:
        return fault
    return f"{fault}; call eval() on {part}.parametrizations, so that they leave it unchanged"


def _written_by_regions(reading: GraphAnalysis, names: Mapping[fx.Node, str]) -> Iterator[str]:
    for node in reading.order:  # inputs have users besides
        for region, inner in regions(node):
            inside = GraphAnalysis(list(inner.nodes))
            outside = given_to(node, region, inner)
            held = {a: names[m] for a, b in outside.items() if (m := reading.memory[b]) in names}
            for memory, writers in inside.writers.items():
                if memory in held:
                    yield from (_changes(writer, held[memory]) for writer in writers)
                elif memory.op == "placeholder":
                    yield (
                        f"{operation(writers[0])} writes to an input of {operation(node)}, at "
                        f"{place_of(writers[0])}. This is unsupported in a region of autocast or "
                        "no_grad"
                    )
            yield from _written_by_regions(inside, held)


_RECURRENT = ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")
_BRANCHES = ("cond", "while_loop", "scan", "map_impl", "associative_scan")


def _untraced(nodes: list[fx.Node]) -> Iterator[str]:
    """Faults for graph nodes that are not operations on tensors."""
    for node in nodes:
        if operation(node) in _BRANCHES:
            yield (
                f"torch.{operation(node)}, at {place_of(node)}: the computation depends on data. "
                "Use operations that always run, such as torch.where"
            )
        elif getattr(node.target, "__name__", "") == "_add_batch_dim":
            yield (
                f"torch.vmap, at {place_of(node)} is not traced. Write its samples as a tensor "
                "dimension"
            )


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
        elif name.startswith(_RECURRENT):
            is_random = bool(argument(node, "dropout") and argument(node, "train"))
        else:
            is_random = torch.Tag.nondeterministic_seeded in tags
        if is_random:
            yield (
                f"{name} is random, at {place_of(node)}: results would depend on the layout. Set "
                "dropout to 0, or call eval()"
            )


def _running(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """Norms that update running statistics, which their schemas do not declare."""
    for node in nodes:
        for inner in inner_graphs(node):
            yield from _running([n for n in inner.nodes if n.op == "call_function"])
        is_norm = operation(node).startswith(("batch_norm", "instance_norm"))
        if is_norm and node.args[3] and node.args[5]:
            yield node


def own_memory_faults(reading: GraphAnalysis, home: Mapping[fx.Node, set[int]]) -> Iterator[str]:
    """Faults for in-place writes that another unit's aliases would see or miss.

    ``home`` gives the units of a node.
    """
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
