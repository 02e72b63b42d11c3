"""Units of an exported graph: links of a chain and embedders before it, with their own graphs."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from megatron_pulse.tracing.graph_analysis import (
    GraphAnalysis,
    can_travel,
    place_of,
    value_of,
)
from megatron_pulse.tracing.torch_export import DerivationError, Exported
from megatron_pulse.tracing.unit_assignment import SizeDecisions, UnitAssignment


@dataclass(frozen=True)
class Unit:
    """One link or embedder: ``graph(*takes, *state) -> gives``.

    ``boundary`` is passed to the next unit; ``pushes`` and ``provides`` reach later ones; ``pops``
    are skips that end here. ``weights`` are the qualified names of the parameters among ``state``,
    and of those that a unit only holds.
    """

    name: str
    graph: fx.Graph
    takes: tuple[str, ...]
    state: tuple[str, ...]
    weights: tuple[str, ...]
    gives: tuple[str, ...]
    embedder: bool
    boundary: tuple[str, ...]
    pushes: tuple[str, ...]
    pops: tuple[str, ...]
    provides: tuple[str, ...]

    @property
    def signature(self) -> dict[str, Any]:
        """All fields except the graph, which depends on batch size and shapes."""
        return {name: value for name, value in vars(self).items() if name != "graph"}


def work_of(unit: Unit, chain: UnitChain, marked: Collection[str] = ()) -> str:
    """Digest that is equal for units with the same operations on tensors of the same kinds.

    Names of values and of weights do not count, but whether weights are ``marked``.
    """
    numbers = {node: f"%{i}" for i, node in enumerate(unit.graph.nodes)}
    lines: list[object] = [
        (
            node.op,
            "" if node.op in ("placeholder", "output") else str(node.target),
            str(fx.node.map_arg((node.args, node.kwargs), lambda one: numbers[one])),
        )
        for node in unit.graph.nodes
    ]
    lines += [_kind_of(chain.values[name]) for name in (*unit.takes, *unit.gives)]
    for name in unit.state:
        held = chain.state.get(name)
        kind = _constant_kinds(chain)[name] if held is None else _kind_of(held)
        lines.append((kind, name in unit.weights, name in marked))
    held_only = [name for name in unit.weights if name not in unit.state]
    lines.append([_kind_of(chain.state[name]) for name in held_only])
    return hashlib.sha256(repr(lines).encode()).hexdigest()


@functools.lru_cache(maxsize=2)
def _constant_kinds(chain: UnitChain) -> Mapping[str, str]:
    """Digest of the operations and tensors that each constant of a chain is made of."""
    given = iter(chain.constant_state)
    kinds: dict[fx.Node, str] = {}
    for node in chain.constants.nodes:
        if node.op == "placeholder":
            said: object = _kind_of(chain.state[next(given)])
        else:
            said = (
                node.op,
                str(node.target),
                str(fx.node.map_arg((node.args, node.kwargs), lambda one: kinds[one])),
            )
        kinds[node] = hashlib.sha256(repr(said).encode()).hexdigest()
    (outputs,) = chain.constants.output_node().args
    return {n: kinds[one] for n, one in zip(chain.constant_names, outputs, strict=True)}


def _kind_of(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


@dataclass(frozen=True, eq=False)
class UnitChain:
    """Embedders, followed by the links; ``values`` holds a meta tensor of what units exchange.

    - ``device``: type of the device on which the module was exported.
    - ``inputs``: the module's inputs with the caller's names; ``sample`` is the noisy one.
    - ``constants``: graph of the constants that units take, by name.
    - ``state``: the module's own parameters and buffers, by qualified name.
    - ``trained``: names of the parameters that get a gradient.
    - ``decided``: decisions that make units equal at other microbatch sizes.
    """

    units: tuple[Unit, ...]
    sample: str
    device: str
    inputs: dict[str, str]
    output: str
    values: dict[str, Tensor]
    state: dict[str, Any]
    trained: frozenset[str]
    constants: fx.Graph
    constant_names: tuple[str, ...]
    constant_state: tuple[str, ...]
    decided: SizeDecisions


def detached_values(chain: UnitChain) -> set[str]:
    """Values that units compute without a parameter, directly or by what they take."""
    trained, detached = set[str](), set[str]()
    for unit in chain.units:
        nodes = list(unit.graph.nodes)
        given = zip(nodes, (*unit.takes, *unit.state), strict=False)
        starts = {node for node, name in given if name in trained or name in unit.weights}
        reached = GraphAnalysis(nodes).after(starts)
        (results,) = unit.graph.output_node().args
        for name, node in zip(unit.gives, results, strict=True):
            (trained if node in reached else detached).add(name)
    return detached


def unit_difference(first: UnitChain, other: UnitChain) -> str | None:
    """First difference between the units of two chains; None if equal."""
    for a, b in zip_longest(first.units, other.units):
        if a is None or b is None:
            return f"{(a or b).name} occurs in only one"
        for what, value in a.signature.items():
            if b.signature[what] != value:
                return f"{what} of {a.name}: {value}, and {b.signature[what]}"
    return None


def derive(
    exported: Exported, module: str, sample: str, pieces: bool, like: SizeDecisions | None = None
) -> UnitChain:
    """Chain of a graph whose noisy sample is the input ``sample``.

    ``module`` is the name for DerivationError. ``pieces`` allows cuts within blocks. A chain of
    another microbatch size or shape passes the first chain's ``decided`` as ``like``.
    """
    placing = UnitAssignment(exported, module, sample, pieces, like)
    units = _units(placing, module)
    constant = set(placing.constants)
    users = exported.reading.users
    kept = [n for n in placing.constants if any(u not in constant for u in users[n])]
    graph, taken = _graph(exported, placing.constants, [], kept)
    trained = {exported.names[n] for n in exported.reading.with_gradient() & exported.weights}
    source = placing.source
    used = {source.name, *(n for unit in units for n in (*unit.takes, *unit.gives))}
    values = {n.name: value_of(n) for n in exported.reading.order if n.name in used}
    return UnitChain(
        (*units[placing.num_links :], *units[: placing.num_links]),
        source.name,
        value_of(source).device.type,
        {node.name: name for node, name in exported.inputs.items()},
        exported.output.name,
        {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in values.items()},
        dict(exported.state),
        frozenset(n for n in trained if exported.state[n].requires_grad),
        graph,
        tuple(map(_constant, kept)),
        taken,
        placing.decided,
    )


def _units(placing: UnitAssignment, module: str) -> list[Unit]:
    """Units in order of their numbers."""
    exported, home, names = placing.exported, placing.home, placing.names
    members = placing.members
    elsewhere = {*exported.inputs, *exported.reading.calls}.difference(placing.constants)
    read: list[dict[fx.Node, None]] = [
        dict.fromkeys(a for n in own for a in n.all_input_nodes) for own in members
    ]
    taken = [
        [a for a in given if a in elsewhere and k not in home.get(a, ())]
        for k, given in enumerate(read)
    ]
    takers: dict[fx.Node, list[int]] = defaultdict(list)
    for k, takes in enumerate(taken):
        for a in takes:
            takers[a].append(k)
    given = [
        [n for n in own if home[n] == {k} and (takers.get(n) or n is exported.output)]
        for k, own in enumerate(members)
    ]
    weights = [tuple(exported.names[a] for a in own if a in exported.weights) for own in read]
    for name, k in _idle(exported, weights):
        weights[k] += (name,)
    faults = [
        (
            f"{n.name}, at {place_of(n)}, passes between layers, but is not a tensor of known size "
            "and dtype"
        )
        for n in (n for gives in given for n in gives)
        if not can_travel(n)
    ]
    if faults := [*faults, *_shared_faults(names, weights)]:
        raise DerivationError(module, faults)
    units = []
    for k, edges in enumerate(route(placing, takers)):
        graph, state = _graph(exported, members[k], taken[k], given[k])
        units.append(
            Unit(
                names[k],
                graph,
                tuple(a.name for a in taken[k]),
                state,
                weights[k],
                tuple(n.name for n in given[k]),
                k >= placing.num_links,
                **vars(edges),
            )
        )
    return units


def _idle(exported: Exported, weights: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Parameters that no unit uses, each with the unit whose parameters are nearest by name.

    Units hold them, so that a checkpoint has all weights of the module.
    """
    near: dict[tuple[str, ...], int] = {}  # prefixes of names
    for k, own in enumerate(weights):
        for path in (tuple(name.split(".")) for name in own):
            for depth in range(len(path)):
                near.setdefault(path[:depth], k)
    used = {name for own in weights for name in own}
    found = []
    for name in dict.fromkeys(exported.names[a] for a in exported.weights):
        path = tuple(name.split("."))
        if name not in used:
            prefix = next(
                path[:depth] for depth in reversed(range(len(path))) if path[:depth] in near
            )
            found.append((name, near[prefix]))
    return sorted(found)


def _shared_faults(names: Sequence[str], weights: Sequence[Sequence[str]]) -> list[str]:
    """Faults for parameters of more than one unit."""
    holder: dict[str, int] = {}
    return [
        f"the parameter {weight} is used by {names[first]} and by {names[k]}, which may be on "
        "different devices"
        for k, own in enumerate(weights)
        for weight in own
        if (first := holder.setdefault(weight, k)) != k
    ]


def _graph(
    exported: Exported, own: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> tuple[fx.Graph, tuple[str, ...]]:
    """Graph of the nodes ``own`` as a function of ``takes`` and state; returns names of the state
    too.
    """
    graph = fx.Graph()
    here = set(own)
    env: dict[fx.Node, fx.Node] = {a: graph.placeholder(a.name) for a in takes}
    state = []
    for a in dict.fromkeys(a for n in own for a in n.all_input_nodes):
        if a in env or a in here:
            continue
        name = exported.names.get(a) or _constant(a)
        if isinstance(exported.state.get(name), fx.GraphModule):
            env[a] = graph.get_attr(name)
        else:
            state.append(name)
            env[a] = graph.placeholder(f"state_{len(state)}")
    for n in own:
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(tuple(env[n] for n in gives))
    graph.lint()
    return graph, tuple(state)


def _constant(node: fx.Node) -> str:
    return f"constant {node.name}"


@dataclass
class Edges:
    """Boundary to the next unit, and pushes, pops and provided values of a unit, by name."""

    boundary: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()


def route(placing: UnitAssignment, takers: Mapping[fx.Node, Sequence[int]]) -> list[Edges]:
    """Edges of every unit; ``takers`` lists the units that take a value from elsewhere."""
    edges = [Edges() for _ in placing.names]
    inputs = set(placing.exported.inputs)
    touched, ends = {**placing.touched}, placing.ends
    home = dict(placing.home)
    if placing.source in takers:
        home[placing.source] = {0}
        touched[placing.source] = [-1, *(ends[k] for k in takers[placing.source])]
    for node, everyone in takers.items():
        if node in inputs and node is not placing.source:
            continue
        (start,) = home[node]
        users = [k for k in everyone if k != start]
        if not users:
            continue
        reach = start
        for user in users if node in touched else ():
            last = max(t for t in touched[node] if t < ends[reach + 1])
            first = min(t for t in touched[node] if t >= ends[user])
            if user > reach + 1 and placing.blocks.rests(last, first):
                break
            reach = user
        far = [k for k in users if k > reach] if node in touched else users
        is_skip = node in touched and len(far) == 1
        # a skip belongs to its unit's boundary outputs, even if the next unit does not use it
        for k in range(start, max(reach, start + 1) if is_skip else reach):
            edges[k].boundary += (node.name,)
        if is_skip:
            edges[start].pushes += (node.name,)
            edges[far[0]].pops += (node.name,)
        elif far:
            edges[start].provides += (node.name,)
    edges[placing.num_links - 1].boundary = (placing.exported.output.name,)
    return edges
