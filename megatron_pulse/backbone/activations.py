"""Activation policies: what happens to the tensors that a layer saves for its backward pass.

Flags, tuner, plan file, plan and executor all speak of these four policies by this one type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from megatron_pulse.errors import did_you_mean


class ActivationPolicy(StrEnum):
    """Treatment of the tensors that a layer saves in forward for its backward."""

    KEEP = "keep"
    """Saved tensors stay in device memory."""
    RECOMPUTE = "recompute"
    """Only the layer's inputs stay; saved tensors are recomputed for backward."""
    OFFLOAD = "offload"
    """Saved tensors may be copied to host memory, and come back before backward."""
    SELECTIVE = "selective"
    """Cheap operations are recomputed. Results of expensive ones, above all matrix products, stay
    (Megatron's selective recomputation).
    """


@dataclass(frozen=True)
class ActivationPolicies:
    """The activation policy of each layer of a chain, as sets of layer indices.

    A layer is in at most one set; a layer in none has policy ``KEEP``. Any collections are taken.
    """

    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    selective: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, frozenset(getattr(self, field.name)))

    def __or__(self, other: ActivationPolicies) -> ActivationPolicies:
        """Policies of both, which are of different layers."""
        return ActivationPolicies(
            self.recompute | other.recompute,
            self.offload | other.offload,
            self.selective | other.selective,
        )

    @staticmethod
    def all(policy: ActivationPolicy, num_layers: int) -> ActivationPolicies:
        """``policy`` for every layer of a chain of ``num_layers``."""
        if policy is ActivationPolicy.KEEP:
            return ActivationPolicies()
        return ActivationPolicies(**{str(policy): frozenset(range(num_layers))})

    @property
    def on_device(self) -> ActivationPolicies:
        """The same policies with ``KEEP`` in place of ``OFFLOAD``: what decides a layer's times."""
        return replace(self, offload=frozenset())

    def without(self, layers: frozenset[int]) -> ActivationPolicies:
        """The same policies, with ``KEEP`` for ``layers``."""
        return ActivationPolicies(
            self.recompute - layers, self.offload - layers, self.selective - layers
        )

    @property
    def recomputes(self) -> bool:
        """True if any layer recomputes all or part of its activations."""
        return bool(self.recompute or self.selective)

    def __bool__(self) -> bool:
        return self.recomputes or bool(self.offload)

    def of(self, layer: int) -> ActivationPolicy:
        """Policy of the layer with this index."""
        for policy, layers in self.sets():
            if layer in layers:
                return policy
        return ActivationPolicy.KEEP

    def sets(self) -> Iterator[tuple[ActivationPolicy, frozenset[int]]]:
        """Each policy but ``KEEP``, with its layers."""
        for field in fields(self):
            yield ActivationPolicy(field.name), getattr(self, field.name)

    def by_name(self, names: Sequence[str]) -> dict[str, str]:
        """Layer name to policy, in chain order, without layers that keep all."""
        policies = ((name, self.of(i)) for i, name in enumerate(names))
        return {name: str(p) for name, p in policies if p is not ActivationPolicy.KEEP}

    def faults(self, num_layers: int) -> Iterator[str]:
        """Indices that are no layer of a chain of ``num_layers``, and layers with two policies."""
        for policy, layers in self.sets():
            for layer in sorted(layers, key=str):
                if type(layer) is not int or not 0 <= layer < num_layers:
                    yield (
                        f"activation policy {policy} has layer {layer!r}; layers are numbers from "
                        f"0 to {num_layers - 1}"
                    )
        counts = Counter(layer for _, layers in self.sets() for layer in layers)
        for layer in sorted((i for i, n in counts.items() if n > 1), key=str):
            both = " and ".join(str(p) for p, layers in self.sets() if layer in layers)
            yield f"layer {layer} has the activation policies {both}: give it one"


def policies_of(by_name: Mapping[str, str], names: Sequence[str]) -> ActivationPolicies:
    """Policies of a chain whose layers have these ``names``; names of other layers are ignored."""
    return ActivationPolicies(
        **{
            str(policy): frozenset(i for i, n in enumerate(names) if by_name.get(n) == policy)
            for policy, _ in ActivationPolicies().sets()
        }
    )


def name_faults(by_name: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
    """Layers in ``by_name`` that a chain of these ``names`` does not have."""
    for name in by_name:
        if name not in names:
            yield f"activations: no stage has a layer {name!r}; {did_you_mean(name, names)}".rstrip(
                "; "
            )
