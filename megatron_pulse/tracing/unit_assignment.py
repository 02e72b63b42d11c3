"""Assignment of an exported graph's operations to units of a chain.

Links hold the operations that depend on the noisy sample and on parameters. Other operations are
assigned by their users:

- with one user: to the user's unit;
- dependent on the sample alone, or small and without parameters: copied to all users;
- used within one block: to the block's first unit, which provides the value;
- otherwise: to an embedder.

Operations that depend on neither inputs nor parameters are constants, computed once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from megatron_pulse.tracing.checks.graph_faults import own_memory_faults
from megatron_pulse.tracing.cut_graph import Blocks, cut
from megatron_pulse.tracing.graph_analysis import can_travel, is_heavy, path_of, size_of
from megatron_pulse.tracing.torch_export import DerivationError, Exported

_COPIED_BYTES = 1 << 16
"""Maximum bytes of an operation without parameters that each of its users recomputes."""


@dataclass(frozen=True)
class SizeDecisions:
    """Decisions based on sizes in bytes, by node names: starts of links, and small nodes.

    Other microbatch sizes reuse them, since units would differ otherwise.
    """

    begins: tuple[str, ...]
    small: frozenset[str]


class UnitAssignment:
    """Units of a graph by number: links in order, then embedders. The noisy sample is ``sample``.

    - ``names``: one name per unit; the first ``num_links`` are links.
    - ``home``: units that compute a node.
    - ``touched``: positions in the chain where a node's value is computed and used.
    - ``ends``: starts of links, and the chain's end.
    - ``constants``: nodes without a unit.
    - ``like``: ``decided`` of another microbatch size.

    Raises DerivationError for ``module``.
    """

    def __init__(
        self,
        exported: Exported,
        module: str,
        sample: str,
        pieces: bool,
        like: SizeDecisions | None = None,
    ) -> None:
        self.exported, self.facts = exported, exported.reading
        facts = self.facts
        self.source = next(n for n, name in exported.inputs.items() if name == sample)
        self._trained = facts.after(exported.weights)
        self._tainted = facts.after({self.source})
        depends = facts.after({*exported.inputs, *exported.weights})
        self.constants = [n for n in facts.calls if n not in depends]
        links = [n for n in facts.calls if n in self._tainted and n in self._trained]
        if exported.output not in links:
            raise DerivationError(
                module, [f"its result does not depend on both {sample} and parameters"]
            )
        number = {node: i for i, node in enumerate(links)}
        end = len(links)
        self.touched = {
            n: [i, *sorted(number.get(u, end) for u in facts.users[n])] for n, i in number.items()
        }
        self.blocks = Blocks(links, exported.blocks)
        together = self._shared_weights(number)
        if like is None:
            self.ends = cut(links, facts, self.touched, self.blocks, together, pieces)
        else:
            begins = set(like.begins)
            self.ends = [*(i for i, n in enumerate(links) if n.name in begins), end]
        self._small, self._like = set[str](), like
        self.home: dict[fx.Node, set[int]] = {}
        self.names: list[str] = []
        for begin, end in zip(self.ends, self.ends[1:], strict=False):
            self.home.update((n, {len(self.names)}) for n in links[begin:end])
            lead = next((i for i in range(begin, end) if is_heavy(links[i])), begin)
            self._name(self.blocks.of[lead] or path_of(links[lead]).split(".")[0])
        self.num_links = len(self.names)
        for group in list(self._place_rest()):
            self.home.update((n, {len(self.names)}) for n in group)
            lead_node = next(filter(is_heavy, group), group[-1])
            self._name(f"embed.{path_of(lead_node).split('.')[0] or 'root'}")
        if faults := list(own_memory_faults(facts, self.home)):
            raise DerivationError(module, list(dict.fromkeys(faults)))
        names = tuple(links[i].name for i in self.ends[:-1])
        self.decided = like or SizeDecisions(names, frozenset(self._small))

    @property
    def members(self) -> list[list[fx.Node]]:
        """Nodes of each unit, in order."""
        members: list[list[fx.Node]] = [[] for _ in self.names]
        for node in self.facts.calls:
            for k in self.home.get(node, ()):
                members[k].append(node)
        return members

    def _shared_weights(self, number: dict[fx.Node, int]) -> list[tuple[int, int]]:
        """Spans of the chain within which one weight is used more than once."""
        uses: dict[str, list[int]] = defaultdict(list)
        for weight in self.exported.weights:
            uses[self.exported.names[weight]] += [
                number[u] for u in self.facts.users[weight] if u in number
            ]
        return [(min(found), max(found)) for found in uses.values() if len(found) > 1]

    def _name(self, base: str) -> None:
        base = re.sub(r"[^\w.]", "_", base)  # keys of a ModuleDict may be any text
        base = base if base[:1].isalpha() or base[:1] == "_" else f"module.{base}".rstrip(".")
        name, n = base, 1
        while name in self.names:
            n += 1
            name = f"{base}.part{n}"
        self.names.append(name)

    def _place_rest(self) -> Iterator[list[fx.Node]]:
        """Assign nodes that are neither links nor constants; yield the members of each embedder."""
        facts = self.facts
        constant = set(self.constants)
        rest = [n for n in facts.calls if n not in self.home and n not in constant]
        found, shared = self._homes(rest, set())
        while parted := self._parted(found, shared):
            found, shared = self._homes(rest, shared | parted)
        self.home.update(found)
        groups: list[set[fx.Node]] = []  # connected by values or by parameters
        for node in (n for n in facts.calls if n in shared):
            joined = {a for a in facts.reads[node] if a in shared or a in self.exported.weights}
            own = {node, *joined}
            own = own.union(*(g for g in groups if g & own))
            groups = [g for g in groups if not g & own] + [own]
        for group in groups:
            yield [n for n in facts.calls if n in group]

    def _homes(
        self, rest: list[fx.Node], embedded: set[fx.Node]
    ) -> tuple[dict[fx.Node, set[int]], set[fx.Node]]:
        """Units that compute each of ``rest``, and nodes of embedders, including ``embedded``."""
        facts, home = self.facts, dict(self.home)
        cone: dict[fx.Node, int] = {}
        for node in rest:
            cone[node] = size_of(node) + sum(cone.get(a, 0) for a in facts.reads[node])
        shared: set[fx.Node] = set()
        for node in reversed(rest):
            users = {k for u in facts.users[node] for k in home.get(u, ())}
            small = node not in self._trained and self._is_small(node, cone[node])
            if node in embedded or shared.intersection(facts.users[node]):
                # lists, and writes to them, stay with their users
                shared.add(node)
                if not can_travel(node):
                    shared.update(u for u in facts.users[node] if u in home and u not in self.home)
            elif len(users) < 2 or small or node in self._tainted or not can_travel(node):
                home[node] = users
            elif len({self.blocks.of[self.ends[k]] or k for k in users}) == 1:
                home[node] = {min(users)}
            else:
                shared.add(node)
        return {n: home[n] for n in rest if n not in shared}, shared

    def _is_small(self, node: fx.Node, num_bytes: int) -> bool:
        if self._like is not None:
            return node.name in self._like.small
        if num_bytes <= _COPIED_BYTES:
            self._small.add(node.name)
        return num_bytes <= _COPIED_BYTES

    def _parted(self, found: dict[fx.Node, set[int]], shared: set[fx.Node]) -> set[fx.Node]:
        """Operations on one weight that would get several homes; embedders compute them.

        An example is a block's embedding recomputed for the head (DiT).
        """
        parted: set[fx.Node] = set()
        for weight in self.exported.weights:
            users = self.facts.users[weight]
            homes = {k for u in users for k in found.get(u, ())}
            if set(users) <= {*found, *shared} and len(homes) + bool(shared & set(users)) > 1:
                parted.update(u for u in users if u in found)
        return parted
