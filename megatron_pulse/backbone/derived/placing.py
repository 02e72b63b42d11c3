"""Which unit of a chain computes each operation of an exported graph.

The links are what depends on the noisy sample and on parameters. The rest goes to where it is used:
what has one user goes into it; what depends on the sample alone, or holds no parameter and is
small, is copied to its users; what one block uses, the block's first unit provides; all else is an
embedder. What depends on neither inputs nor parameters is a constant, computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from megatron_pulse.backbone.derived.cutting import Blocks, cut
from megatron_pulse.backbone.derived.exported import DerivationError, Exported, own_memory_faults
from megatron_pulse.backbone.derived.reading import is_heavy, is_tensor, path_of, size_of

_COPIED_BYTES = 1 << 16
"""What holds no parameter and writes no more is computed again by each of its users."""


class Placing:
    """The units of a graph whose noisy sample is the input ``sample``, by number: the links in
    order, then the embedders.

    ``names`` has one for each unit, ``num_links`` are links; ``home`` says which units compute a
    node, ``touched`` where in the chain a value of it is computed and used, ``ends`` where links
    begin there. ``constants`` belong to no unit. Raises DerivationError for ``module``.
    """

    def __init__(self, exported: Exported, module: str, sample: str, pieces: bool) -> None:
        self.exported, self.facts = exported, exported.reading
        facts = self.facts
        self.source = next(n for n in exported.inputs if n.name == sample)
        self._trained = facts.after(exported.weights)
        self._tainted = facts.after({self.source})
        depends = facts.after({*exported.inputs, *exported.weights})
        self.constants = [n for n in facts.calls if n not in depends]
        links = [n for n in facts.calls if n in self._tainted and n in self._trained]
        if exported.output not in links:
            raise DerivationError(
                module, [f"what it returns does not depend on {sample} and on parameters"]
            )
        number = {node: i for i, node in enumerate(links)}
        end = len(links)
        self.touched = {
            n: [i, *sorted(number.get(u, end) for u in facts.users[n])] for n, i in number.items()
        }
        self.blocks = Blocks(links, exported.blocks)
        together = self._shared_weights(number)
        self.ends = cut(links, facts, self.touched, self.blocks, together, pieces)
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

    @property
    def members(self) -> list[list[fx.Node]]:
        """The nodes of each unit, in order."""
        members: list[list[fx.Node]] = [[] for _ in self.names]
        for node in self.facts.calls:
            for k in self.home.get(node, ()):
                members[k].append(node)
        return members

    def _shared_weights(self, number: dict[fx.Node, int]) -> list[tuple[int, int]]:
        """The spans of the chain in which one weight is used more than once."""
        uses: dict[str, list[int]] = defaultdict(list)
        for weight in self.exported.weights:
            uses[self.exported.names[weight]] += [
                number[u] for u in self.facts.users[weight] if u in number
            ]
        return [(min(found), max(found)) for found in uses.values() if len(found) > 1]

    def _name(self, base: str) -> None:
        base = base if base[:1].isalpha() or base[:1] == "_" else f"module.{base}".rstrip(".")
        name, n = base, 1
        while name in self.names:
            n += 1
            name = f"{base}.part{n}"
        self.names.append(name)

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
            small = node not in self._trained and cone[node] <= _COPIED_BYTES
            if shared.intersection(facts.users[node]):
                # what is a list, and writes to it, stay with those who use it
                shared.update([node] if is_tensor(node) else [node, *facts.users[node]])
            elif len(users) < 2 or small or node in self._tainted or not is_tensor(node):
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
