"""An exported graph as units: the links of a chain, and embedders before it.

The links are what depends on the noisy sample and on parameters. The rest goes to where it is used:
what has one user goes into it; what depends on the sample alone, or holds no parameter and is
small, is copied to its users; what one block uses, the block's first unit provides; all else is an
embedder. What depends on neither inputs nor parameters is a constant, computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from megatron_pulse.backbone.derived.cutting import Blocks, cut
from megatron_pulse.backbone.derived.exported import (
    DerivationError,
    Exported,
    own_memory_faults,
)
from megatron_pulse.backbone.derived.reading import (
    is_heavy,
    is_tensor,
    path_of,
    place_of,
    size_of,
    value_of,
)

_COPIED_BYTES = 1 << 16
"""What holds no parameter and writes no more is computed again by each of its users."""

Homes = dict[fx.Node, set[int]]
"""The units that compute a node."""


@dataclass(frozen=True)
class Unit:
    """One link or embedder: ``graph(*takes, *state) -> gives``.

    ``boundary`` is handed to the next unit, ``pushes`` and ``provides`` reach later ones, ``pops``
    are skips that end here. ``weights`` are the qualified names of its parameters, among ``state``.
    """

    name: str
    graph: fx.Graph
    takes: tuple[str, ...]
    state: tuple[str, ...]
    weights: tuple[str, ...]
    gives: tuple[str, ...]
    embedder: bool
    boundary: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple[Any, ...]:
        """All but the graph, which is of one batch size."""
        return tuple(value for name, value in vars(self).items() if name != "graph")


@dataclass(frozen=True)
class Chain:
    """Embedders first, then the links; ``values`` holds a fake tensor of every value.

    ``constants`` computes what units take by the name of a constant. ``state`` holds the module's
    own parameters and buffers by their qualified names.
    """

    units: tuple[Unit, ...]
    sample: str
    output: str
    values: dict[str, Any]
    state: dict[str, Any]
    constants: fx.Graph
    constant_names: tuple[str, ...] = field(default=())
    constant_state: tuple[str, ...] = field(default=())


def derive(exported: Exported, module: str, sample: str, pieces: bool) -> Chain:
    """The chain of a graph whose noisy sample is the input ``sample``.

    ``module`` is its name, for DerivationError. ``pieces`` cuts within blocks too.
    """
    return _Derivation(exported, module, sample, pieces).chain()


class _Derivation:
    def __init__(self, exported: Exported, module: str, sample: str, pieces: bool) -> None:
        self.exported, self.module = exported, module
        self.facts = facts = exported.reading
        self.source = next(n for n in exported.inputs if n.name == sample)
        self.trained = facts.after(exported.weights)
        self.tainted = facts.after({self.source})
        depends = facts.after({*exported.inputs, *exported.weights})
        self.constants = [n for n in facts.calls if n not in depends]
        self.links = [n for n in facts.calls if n in self.tainted and n in self.trained]
        if exported.output not in self.links:
            raise DerivationError(
                module, [f"what it returns does not depend on {sample} and on parameters"]
            )
        number = {node: i for i, node in enumerate(self.links)}
        end = len(self.links)
        self.touched: dict[fx.Node, list[int]] = {
            n: [i, *sorted(number.get(u, end) for u in facts.users[n])] for n, i in number.items()
        }
        self.blocks = Blocks(self.links, exported.blocks)
        together = self._shared_weights(number)
        self.ends = cut(self.links, facts, self.touched, self.blocks, together, pieces)
        self.home: Homes = {}
        self.names: list[str] = []

    def _shared_weights(self, number: dict[fx.Node, int]) -> list[tuple[int, int]]:
        """The spans of the chain in which one weight is used more than once."""
        uses: dict[str, list[int]] = defaultdict(list)
        for weight in self.exported.weights:
            uses[self.exported.names[weight]] += [
                number[u] for u in self.facts.users[weight] if u in number
            ]
        return [(min(found), max(found)) for found in uses.values() if len(found) > 1]

    def chain(self) -> Chain:
        for begin, end in zip(self.ends, self.ends[1:], strict=False):
            members = self.links[begin:end]
            self.home.update((n, {len(self.names)}) for n in members)
            lead = next((i for i in range(begin, end) if is_heavy(self.links[i])), begin)
            self._name(self.blocks.of[lead] or path_of(self.links[lead]).split(".")[0])
        self.length = len(self.names)
        for group in list(self._place_rest()):
            self.home.update((n, {len(self.names)}) for n in group)
            lead_node = next(filter(is_heavy, group), group[-1])
            self._name(f"embed.{path_of(lead_node).split('.')[0] or 'root'}")
        if faults := list(own_memory_faults(self.facts, self.home)):
            raise DerivationError(self.module, list(dict.fromkeys(faults)))
        units, takers = self._build()
        units = self._route(units, takers)
        kept = self._kept_constants()
        graph, taken = self._graph(self.constants, [], kept)
        return Chain(
            (*units[self.length :], *units[: self.length]),
            self.source.name,
            self.exported.output.name,
            {n.name: value_of(n) for n in self.facts.order if n.op != "output"},
            dict(self.exported.state),
            graph,
            tuple(map(_constant, kept)),
            taken,
        )

    def _name(self, base: str) -> None:
        base = base if base[:1].isalpha() or base[:1] == "_" else f"module.{base}".rstrip(".")
        name, n = base, 1
        while name in self.names:
            n += 1
            name = f"{base}.part{n}"
        self.names.append(name)

    # --- the rest -----------------------------------------------------------------------------

    def _place_rest(self) -> Iterator[list[fx.Node]]:
        """Find homes for what is no link and no constant; yields the members of each embedder."""
        facts, home = self.facts, self.home
        constant = set(self.constants)
        rest = [n for n in facts.calls if n not in home and n not in constant]
        cone: dict[fx.Node, int] = {}
        for node in rest:
            cone[node] = size_of(node) + sum(cone.get(a, 0) for a in facts.reads[node])
        shared: set[fx.Node] = set()
        for node in reversed(rest):
            users = {k for u in facts.users[node] for k in home.get(u, ())}
            small = node not in self.trained and cone[node] <= _COPIED_BYTES
            if shared.intersection(facts.users[node]):
                # what is a list, and writes to it, stay with those who use it
                shared.update([node] if is_tensor(node) else [node, *facts.users[node]])
            elif len(users) < 2 or small or node in self.tainted or not is_tensor(node):
                home[node] = users
            elif len({self.blocks.of[self.ends[k]] or k for k in users}) == 1:
                home[node] = {min(users)}
            else:
                shared.add(node)
        groups: list[set[fx.Node]] = []  # connected by values or by parameters
        for node in (n for n in facts.calls if n in shared):
            home.pop(node, None)
            joined = {a for a in facts.reads[node] if a in shared or a in self.exported.weights}
            own = {node, *joined}
            own = own.union(*(g for g in groups if g & own))
            groups = [g for g in groups if not g & own] + [own]
        for group in groups:
            yield [n for n in facts.calls if n in group]

    def _kept_constants(self) -> list[fx.Node]:
        constant = set(self.constants)
        return [n for n in self.constants if any(u not in constant for u in self.facts.users[n])]

    # --- graphs -------------------------------------------------------------------------------

    def _build(self) -> tuple[list[Unit], dict[fx.Node, list[int]]]:
        """The units in order of their numbers, and which of them take a value from elsewhere."""
        facts, home, exported = self.facts, self.home, self.exported
        members: list[list[fx.Node]] = [[] for _ in self.names]
        for node in facts.calls:
            for k in home.get(node, ()):
                members[k].append(node)
        takers: dict[fx.Node, list[int]] = defaultdict(list)
        taken: list[list[fx.Node]] = []
        constant = set(self.constants)
        inputs = set(exported.inputs)
        for k, own in enumerate(members):
            outside = dict.fromkeys(
                a for n in own for a in n.all_input_nodes if k not in home.get(a, ())
            )
            takes = [
                a for a in outside if a in inputs or a.op == "call_function" and a not in constant
            ]
            for a in takes:
                takers[a].append(k)
            taken.append(takes)
        units = []
        holder: dict[str, int] = {}
        faults = []
        for k, own in enumerate(members):
            gives = [n for n in own if home[n] == {k} and (takers.get(n) or n is exported.output)]
            if odd := [n for n in gives if not is_tensor(n)]:
                faults += [f"{n.name}, at {place_of(n)}, is no tensor, and handed on" for n in odd]
            graph, state = self._graph(own, taken[k], gives)
            weights = tuple(
                exported.names[a]
                for a in dict.fromkeys(a for n in own for a in n.all_input_nodes)
                if a in exported.weights
            )
            for weight in weights:
                if holder.setdefault(weight, k) != k:
                    faults.append(
                        f"the parameter {weight} is used by {self.names[holder[weight]]} and by "
                        f"{self.names[k]}, which could be on two devices"
                    )
            units.append(
                Unit(
                    self.names[k],
                    graph,
                    tuple(a.name for a in taken[k]),
                    state,
                    weights,
                    tuple(n.name for n in gives),
                    k >= self.length,
                )
            )
        if faults:
            raise DerivationError(self.module, faults)
        return units, takers

    def _graph(
        self, own: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]
    ) -> tuple[fx.Graph, tuple[str, ...]]:
        """The nodes ``own`` as a graph of ``takes`` and of state by name, and these names."""
        graph = fx.Graph()
        here = set(own)
        env = {a: graph.placeholder(a.name) for a in takes}
        state = []
        for a in dict.fromkeys(a for n in own for a in n.all_input_nodes):
            if a in env or a in here:
                continue
            name = self.exported.names.get(a) or _constant(a)
            if isinstance(self.exported.state.get(name), fx.GraphModule):
                env[a] = graph.get_attr(name)
            else:
                state.append(name)
                env[a] = graph.placeholder(f"state_{len(state)}")
        for n in own:
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[n] for n in gives))
        graph.lint()
        return graph, tuple(state)

    # --- edges --------------------------------------------------------------------------------

    def _route(self, units: list[Unit], takers: dict[fx.Node, list[int]]) -> list[Unit]:
        """``units`` with what each hands on, pushes, pops and provides."""
        found: dict[str, list[list[str]]] = {
            kind: [[] for _ in units] for kind in ("boundary", "pushes", "pops", "provides")
        }
        inputs = set(self.exported.inputs)
        touched = {**self.touched}
        if self.source in takers:
            self.home[self.source] = {0}
            touched[self.source] = [-1, *(self.ends[k] for k in takers[self.source])]
        for node, everyone in takers.items():
            if node in inputs and node is not self.source:
                continue
            (home,) = self.home[node]
            name = node.name
            users = [k for k in everyone if k != home]
            if not users:
                continue
            reach = home
            for user in users if node in touched else ():
                last = max(t for t in touched[node] if t < self.ends[reach + 1])
                first = min(t for t in touched[node] if t >= self.ends[user])
                if user > reach + 1 and self.blocks.rests(last, first):
                    break
                reach = user
            far = [k for k in users if k > reach] if node in touched else users
            is_skip = node in touched and len(far) == 1
            # a skip is among what its unit hands on, though the next one may not use it
            for k in range(home, max(reach, home + 1) if is_skip else reach):
                found["boundary"][k].append(name)
            if is_skip:
                found["pushes"][home].append(name)
                found["pops"][far[0]].append(name)
            elif far:
                found["provides"][home].append(name)
        found["boundary"][self.length - 1] = [self.exported.output.name]
        routed = {kind: [tuple(names) for names in lists] for kind, lists in found.items()}
        return [
            replace(
                unit,
                boundary=routed["boundary"][k],
                pushes=routed["pushes"][k],
                pops=routed["pops"][k],
                provides=routed["provides"][k],
            )
            for k, unit in enumerate(units)
        ]


def _constant(node: fx.Node) -> str:
    return f"constant {node.name}"
