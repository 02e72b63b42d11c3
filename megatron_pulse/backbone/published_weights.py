"""Published weight formats: parameter names, layouts and configuration of a backbone's library.

A family states rules from our parameter names to the published ones; other names are equal.
Conversion is exact in both directions, since only rows move.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_pulse.errors import PicklableError, UserError, format_faults

if TYPE_CHECKING:
    from torch import Tensor


class WeightLayout(Protocol):
    """Correspondence between our tensors' values and the published ones."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """Convert our tensors into ``count`` published tensors."""
        ...

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """Convert published tensors into our ``count`` tensors; the inverse of ``publish``."""
        ...


class Unchanged:
    """One tensor, stored unchanged."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The tensor itself."""
        return list(ours)

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The tensor itself."""
        return list(theirs)


@dataclass(frozen=True)
class PerHead:
    """Megatron's fused projection, published as separate tensors.

    Our rows are ordered (head, q | k | v, feature). Applies to weights ``[count * heads * features,
    inputs]`` and to biases. ``num_heads`` is the attention's number of heads.
    """

    num_heads: int

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """``count`` tensors with rows ordered (head, feature)."""
        (fused,) = ours
        rest = fused.shape[1:]
        by_head = fused.reshape(self.num_heads, count, -1, *rest)
        return [part.reshape(-1, *rest) for part in by_head.unbind(1)]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The fused tensor."""
        import torch

        rest = theirs[0].shape[1:]
        parts = [part.reshape(self.num_heads, -1, *rest) for part in theirs]
        return [torch.stack(parts, 1).reshape(-1, *rest)]


@dataclass(frozen=True)
class FusedPerHead:
    """As ``PerHead`` for self-attention, but published as one tensor of q, k and v in sequence."""

    num_heads: int

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """One tensor with rows ordered (q | k | v, head, feature)."""
        import torch

        return [torch.cat(PerHead(self.num_heads).publish(ours, 3))]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The fused tensor."""
        return PerHead(self.num_heads).adopt(theirs[0].chunk(3), count)


@dataclass(frozen=True)
class Concatenated:
    """Several tensors of ``sizes`` along ``dim``, published as their concatenation."""

    sizes: tuple[int, ...]
    dim: int = 0

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The concatenated tensor."""
        import torch

        return [torch.cat(list(ours), self.dim)]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The parts, each in its own memory."""
        (whole,) = theirs
        return [part.clone() for part in whole.split(list(self.sizes), self.dim)]


class SwappedHalves:
    """Gated linear unit: Megatron stores (gate, value), diffusers (value, gate)."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """Swap the halves of the rows."""
        import torch

        first, second = ours[0].chunk(2)
        return [torch.cat([second, first])]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """Swap the halves of the rows back."""
        return self.publish(theirs, count)


@dataclass(frozen=True)
class Rule:
    """Parameters ``ours`` are published as ``theirs``.

    Both are name templates. Each ``*`` stands for any text; the texts are equal in all templates,
    in order: ``Rule("*.linear_qkv.*", ("*.to_q.*", "*.to_k.*", "*.to_v.*"), PerHead(8))``.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    layout: WeightLayout = field(default_factory=Unchanged)

    def match(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """(our names, published names) of the group with our ``name``; None without a match."""
        for template in _tuple(self.ours):
            pattern = "(.+)".join(map(re.escape, template.split("*")))
            if found := re.fullmatch(pattern, name):
                return (
                    tuple(_fill(t, found.groups()) for t in _tuple(self.ours)),
                    tuple(_fill(t, found.groups()) for t in _tuple(self.theirs)),
                )
        return None


@dataclass(frozen=True)
class Published:
    """A backbone as its library stores it.

    - ``class_name``, ``config``: contents of ``config.json``.
    - ``rules``: the first rule that matches a parameter applies.
    - ``ignored``: templates of optional published names without trained values (recomputed
      positions).
    - ``constants``: factory of untrained tensors stored beside the weights, by published name. They
      are written, and compared on reading.
    - ``part``: prefix if the class is a part of the backbone. Only tensors with this prefix are
      written, without the prefix; another class, read together, holds the rest.
    - ``on_load``: maps current names to stored names, which may be of older versions.
    - ``tied``: further names of tied weights, each with the published one. They are written, and
      compared on reading.
    """

    library: str
    class_name: str
    config: Mapping[str, Any]
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()
    constants: Callable[[], Mapping[str, Tensor]] = dict
    part: str = ""
    on_load: Callable[[Iterable[str]], Mapping[str, str]] = lambda names: {n: n for n in names}
    tied: Callable[[], Mapping[str, str]] = dict


class PublishedError(PicklableError, UserError):
    """Weights that do not fit the backbone; ``faults`` lists every reason."""

    def __init__(self, what: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(format_faults(what, faults))


def names_on_load(model: object, names: Iterable[str]) -> dict[str, str]:
    """Map the names that ``model`` uses to the stored ``names``; the model need not be diffusers'.

    diffusers' classes rename tensors of older versions (``query`` is ``to_q`` today), and declare
    names to ignore.
    """
    found = {name: name for name in names}
    rename = getattr(model, "_fix_state_dict_keys_on_load", None)
    if rename is not None:
        rename(found)
    patterns: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own: Mapping[str, Any] = getattr(model, "state_dict", dict)() if patterns else {}
    return {
        name: stored
        for name, stored in found.items()
        if name in own or not any(re.search(pattern, name) for pattern in patterns)
    }


class Renamed(Mapping[str, "Tensor"]):
    """View of ``stored`` tensors under other names; each is read on access."""

    def __init__(self, stored: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def untied(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """``tensors`` with each weight under its own name alone, which ``tied`` gives for its others:
    of several that are there its own counts."""
    names = {name: name for name in tensors if name not in tied}
    for other, own in tied.items():
        if other in tensors:
            names.setdefault(own, other)
    return Renamed(tensors, names)


def torn(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> list[str]:
    """A fault for each of ``tensors`` that is one weight with another under a name of ``tied``, and
    has other values; looks at values of those alone."""
    faults = []
    counts: dict[str, str] = {}
    for name, own in [*((own, own) for own in tied.values()), *tied.items()]:
        if name in tensors:
            first = counts.setdefault(own, name)
            if first != name and not _is_equal(tensors[first], tensors[name]):
                faults.append(f"{first} and {name} are one weight here, and their values differ")
    return faults


def _is_equal(first: Tensor, second: Tensor) -> bool:
    import torch

    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and bool(torch.equal(first, second.to(first.device)))


def to_published(published: Published, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our ``state`` (parameters, gradients or EMA of all layers) to published names."""
    result: dict[str, Tensor] = {}
    for ours, theirs, layout in _groups(published, state):
        tensors = layout.publish([state[name] for name in ours], len(theirs))
        result.update(zip(theirs, tensors, strict=True))
    return result


def adopted(
    published: Published, like: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield our names and tensors, converted from fitting published ``tensors`` (``require_fit``).

    ``like`` has our names. Each published tensor is held only while its results are yielded. Values
    are checked on the way. Non-float types and non-finite values raise PublishedError at the end,
    listing every name of ``what``; discard all yielded tensors then.
    """
    faults: list[str] = []
    for ours, theirs, layout in _groups(published, like):
        given = {name: tensors[name] for name in theirs}
        for name, tensor in given.items():
            faults += _faults_of_values(name, tensor)
        if not faults:
            yield from zip(ours, layout.adopt(list(given.values()), len(ours)), strict=True)
    if faults:
        raise PublishedError(what, faults)


def require_fit(
    published: Published, like: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str
) -> None:
    """Raise PublishedError unless names and shapes of ``tensors`` fit ``like``.

    The error lists every missing, unexpected or misshapen name. No value is read, so meta tensors
    suffice.
    """
    import torch

    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in like.items()}
    weights = to_published(published, meta)
    expected = {**weights, **published.constants()}
    faults = [f"{name} is missing" for name in sorted(weights.keys() - tensors.keys())]
    faults += [
        f"{name} is unexpected"
        for name in sorted(tensors.keys() - expected.keys())
        if not any(Rule(template, "").match(name) for template in published.ignored)
    ]
    faults += [
        f"{name} has the shape {list(tensors[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if faults:
        raise PublishedError(what, faults)


def _faults_of_values(name: str, tensor: Tensor) -> Iterator[str]:
    """Faults of a tensor's type and values, independent of its precision."""
    if not _is_float(tensor):
        kind = str(tensor.dtype).removeprefix("torch.")
        yield f"{name} has the type {kind}, expected float32, float16, bfloat16 or float64"
    elif not is_finite(tensor):
        yield f"{name} holds NaN or infinite values"


def _is_float(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point()) and tensor.element_size() > 1  # fp8 needs scales


def is_finite(tensor: Tensor) -> bool:
    """True if all elements are finite in fp32; makes no copy."""
    import torch

    if not tensor.numel():
        return True
    return all(bool(extreme.float().isfinite()) for extreme in torch.aminmax(tensor))


Group = tuple[tuple[str, ...], tuple[str, ...], WeightLayout]
"""Parameters that are published together: our names, published names, layout."""


def group_of(rules: Iterable[Rule], name: str) -> Group:
    """Group of our parameter ``name``: by the first rule that matches, else unchanged."""
    for rule in rules:
        if matched := rule.match(name):
            return (*matched, rule.layout)
    return (name,), (name,), Unchanged()


def _groups(published: Published, names: Mapping[str, Any]) -> list[Group]:
    """All groups of our ``names``, without duplicates."""
    groups: dict[tuple[str, ...], Group] = {}
    for name in names:
        group = group_of(published.rules, name)
        groups.setdefault(group[0], group)
    return list(groups.values())


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _fill(template: str, texts: Sequence[str]) -> str:
    parts: list[str] = template.split("*")
    filled = [part + text for part, text in zip(parts, texts, strict=False)]
    return "".join(filled) + "".join(parts[len(filled) :])
