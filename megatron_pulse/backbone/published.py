"""How the library that published a backbone stores its weights: names, layouts, configuration.

A family states it as rules from our parameter names to the published ones; what no rule names is
called the same. Converting is exact in both directions: only rows move.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_pulse.faults import Carried, UserError, told

if TYPE_CHECKING:
    from torch import Tensor


class WeightLayout(Protocol):
    """How the values of our tensors and of the published ones correspond."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The ``count`` published tensors."""
        ...

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """Our ``count`` tensors; the inverse of ``publish``."""
        ...


class Same:
    """One tensor, stored as it is."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The tensor itself."""
        return list(ours)

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The tensor itself."""
        return list(theirs)


@dataclass(frozen=True)
class PerHead:
    """Megatron's fused projection: rows ordered (head, q | k | v, feature); published apart.

    For weights ``[count * heads * features, inputs]`` and biases. ``num_heads`` of the attention.
    """

    num_heads: int

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """``count`` tensors whose rows are ordered (head, feature)."""
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
    """As ``PerHead`` for self-attention, but published as one tensor: q, k, v one after another."""

    num_heads: int

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The tensor whose rows are ordered (q | k | v, head, feature)."""
        import torch

        return [torch.cat(PerHead(self.num_heads).publish(ours, 3))]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The fused tensor."""
        return PerHead(self.num_heads).adopt(theirs[0].chunk(3), count)


@dataclass(frozen=True)
class Joined:
    """Published as one tensor: ours, of ``sizes`` along ``dim``, one after the other."""

    sizes: tuple[int, ...]
    dim: int = 0

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The joined tensor."""
        import torch

        return [torch.cat(list(ours), self.dim)]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The parts, each in memory of its own."""
        (whole,) = theirs
        return [part.clone() for part in whole.split(list(self.sizes), self.dim)]


class SwappedHalves:
    """A gated linear unit: Megatron stores (gate, value), diffusers (value, gate)."""

    def publish(self, ours: Sequence[Tensor], count: int) -> list[Tensor]:
        """The halves of the rows, exchanged."""
        import torch

        first, second = ours[0].chunk(2)
        return [torch.cat([second, first])]

    def adopt(self, theirs: Sequence[Tensor], count: int) -> list[Tensor]:
        """The halves of the rows, exchanged back."""
        return self.publish(theirs, count)


@dataclass(frozen=True)
class Rule:
    """Parameters ``ours`` are published as ``theirs``.

    Both are names in which each ``*`` stands for any text, the same in all of them, in order:
    ``Rule("*.linear_qkv.*", ("*.to_q.*", "*.to_k.*", "*.to_v.*"), PerHead(8))``.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    layout: WeightLayout = field(default_factory=Same)

    def match(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """(our names, published names) of the group that ``name`` is in, None if no ours is."""
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

    ``class_name`` and ``config`` are what ``config.json`` holds. The first rule that names a
    parameter counts. ``ignored`` are templates of published names that hold nothing trained
    (recomputed positions) and may be there or not. ``constants`` makes what is stored beside the
    weights and not trained either, by published names: written, and compared where it is read.
    Where the class is a ``part`` of the backbone, only tensors whose names begin so are written,
    without that; the others are another class's, which it is read with. ``on_load`` gives, for the
    names of stored tensors, those of older versions by what they are called today. ``tied`` gives
    the other names of weights that have several, with the published one: written, and compared
    where they are read.
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


class PublishedError(Carried, UserError):
    """Weights that are not those of the backbone; ``faults`` lists every reason."""

    def __init__(self, what: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(told(what, faults))


def names_on_load(model: object, names: Iterable[str]) -> dict[str, str]:
    """The ``names`` of stored tensors by what ``model`` calls them, a module of diffusers or not.

    diffusers' classes rename what older versions called otherwise (``query`` is ``to_q`` today),
    and leave aside what they say may be there.
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
    """``stored`` tensors by other names, each read when it is asked for."""

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
    """Our ``state`` (parameters, gradients or averages of all layers) under published names."""
    result: dict[str, Tensor] = {}
    for ours, theirs, layout in _groups(published, state):
        tensors = layout.publish([state[name] for name in ours], len(theirs))
        result.update(zip(theirs, tensors, strict=True))
    return result


def adopted(
    published: Published, like: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str
) -> Iterator[tuple[str, Tensor]]:
    """Our names and what published ``tensors`` that fit (``require_fit``) make of them.

    ``like`` has our names. Each of ``tensors`` is held only while its own are yielded. Raises
    PublishedError listing every name of ``what`` that is of the wrong type or not finite: at the
    end, since values are looked at as they come. Until then nothing yielded counts.
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
    """Raise PublishedError unless the names and shapes of ``tensors`` are those of ``like``.

    It lists every name that is missing, unexpected or of the wrong shape. Meta tensors will do for
    both: no value is looked at.
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
    """What makes a tensor no weight, whatever the number of its bits."""
    if not _is_float(tensor):
        kind = str(tensor.dtype).removeprefix("torch.")
        yield f"{name} has the type {kind}, expected float32, float16, bfloat16 or float64"
    elif not is_finite(tensor):
        yield f"{name} holds NaN or infinite values"


def _is_float(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point()) and tensor.element_size() > 1  # fp8 needs scales


def is_finite(tensor: Tensor) -> bool:
    """Whether all is finite in fp32, without a copy."""
    import torch

    if not tensor.numel():
        return True
    return all(bool(extreme.float().isfinite()) for extreme in torch.aminmax(tensor))


_Group = tuple[tuple[str, ...], tuple[str, ...], WeightLayout]


def _groups(published: Published, names: Mapping[str, Any]) -> list[_Group]:
    """Our names, the published ones, and the layout, of every group, each once."""
    groups: dict[tuple[str, ...], _Group] = {}
    for name in names:
        group: _Group = ((name,), (name,), Same())
        for rule in published.rules:
            if matched := rule.match(name):
                group = (*matched, rule.layout)
                break
        groups.setdefault(group[0], group)
    return list(groups.values())


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _fill(template: str, texts: Sequence[str]) -> str:
    parts: list[str] = template.split("*")
    filled = [part + text for part, text in zip(parts, texts, strict=False)]
    return "".join(filled) + "".join(parts[len(filled) :])
