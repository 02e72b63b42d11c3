"""What a layer saves for its backward pass without what is cheap to have again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_pulse.runtime.saved.written import written

LEAST_BYTES = 1 << 12
"""What is smaller is saved: having it again takes longer than it is worth."""

WORTH = 0.5
"""Of its bytes, what may have to be saved more for a tensor to be left out."""

MOST_CALLS = 32
"""Cheap operators that are called to make one tensor, at most."""

_aten = torch.ops.aten

_CHEAP = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overloads in {
        **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), "default"),
        **dict.fromkeys(("gelu", "silu", "relu", "sigmoid", "tanh", "neg", "rsqrt"), "default"),
        **dict.fromkeys(("add", "sub", "mul", "div"), "Tensor Scalar"),
        **dict.fromkeys(("leaky_relu", "elu", "softplus", "hardtanh", "exp", "clone"), "default"),
        "pow": "Tensor_Scalar",
        "mean": "dim",
        "_to_copy": "default",
        "cat": "default",
        "upsample_nearest2d": "default vec",
        "upsample_nearest1d": "default vec",
        "upsample_nearest3d": "default vec",
    }.items()
    for overload in overloads.split()
    if hasattr(_aten, name) and hasattr(getattr(_aten, name), overload)
)
"""Operators that take about as long as it takes to read and write their tensors, and come to the
same each time."""


class Selective:
    """One layer on one microbatch, of which what is cheap is not kept from forward to backward.

    Norms, activation functions, sums and products of elements, casts and upsampling are a small
    part of a layer's work, and half of what it saves; what matrices, convolutions and attention
    give is saved, as is what is random. Of a feed-forward part::

        x    -> norm -> n -> linear -> h -> gelu -> g -> linear -> out
        saved   (dropped)   saved      (dropped)
        backward: g = gelu(h), n = norm(x) when their linear's weight gradient wants them

    Every operator is followed while the layer runs. At its end a saved tensor is left out if cheap
    operators make it of tensors that are saved anyhow, of parameters, or of some that have at most
    half of its bytes (``WORTH``), which are then saved in its place. In the backward pass the same
    operators are called with the same tensors: the numbers are the same to the last bit. What an
    operator has written into within the layer is not used, nor are ``buffers``, which others may
    change; where something that is saved is written into later, the backward raises PulseError,
    which names the ``layer``. (What is written past torch, by NumPy or ``.data``, nobody sees.)
    What cheap operators made and nobody holds is let go at once, as always; what others made and
    cheap ones took, at the layer's end.
    """

    def __init__(
        self, layer: str, parameters: Iterable[Tensor], buffers: Iterable[Tensor] = ()
    ) -> None:
        self._layer = layer
        self._constants = set(map(_key, _strided(parameters)))
        self._buffers = set(map(_key, _strided(buffers)))
        self._saved: list[_Saved] = []
        self._known: list[weakref.ref[_Saved]] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within, the layer runs."""
        followed = _Followed(self._buffers)
        with saved_tensors_hooks(self._pack, _take), followed:
            yield
        self._choose(followed)
        # Autograd holds whoever packed, as long as it holds anything of the layer.
        self._known, self._saved = list(map(weakref.ref, self._saved)), []

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept for the backward, before any of it was taken."""
        held: list[Tensor] = []
        for saved in (known() for known in self._known):
            if saved is None:
                continue
            held += [saved.tensor] if saved.view is None else saved.view.made.ends()
        return held

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if tensor.layout is not torch.strided:
            return tensor
        saved = _Saved(self._layer, tensor.detach())
        if _key(tensor) not in self._constants | self._buffers:
            self._saved.append(saved)
        return saved

    def _choose(self, followed: _Followed) -> None:
        """Leave out what can be had again, the largest first."""
        own: dict[int, list[_Saved]] = {}
        for saved in self._saved:
            own.setdefault(_key(saved.tensor), []).append(saved)
        kept = {key: each[0].tensor for key, each in own.items()}
        dropped: dict[int, _Made] = {}
        for key in sorted(own, key=lambda key: _num_bytes(kept[key]), reverse=True):
            tensor = kept[key]
            made = followed.made_of(tensor)
            if made is None or _num_bytes(tensor) < LEAST_BYTES:
                continue
            if not all(made.is_like(saved.tensor) for saved in own[key]):
                continue
            others = {other: each for other, each in kept.items() if other != key}
            ends = followed.sound_ends(made, others)
            if ends is None:
                continue
            more = {
                _key(end): end for end in ends if _key(end) not in others.keys() | self._constants
            }
            if sum(map(_num_bytes, more.values())) <= WORTH * _num_bytes(tensor):
                kept = {**others, **more}
                dropped[key] = made
        for made in dropped.values():
            made.take_from(kept)
        for key, made in dropped.items():
            for saved in own[key]:
                saved.leave_to(made)


class _Followed(TorchDispatchMode):
    """Within, notes which operators make what, and what they write into."""

    def __init__(self, never: Set[int]) -> None:
        super().__init__()
        self._never = never
        self._made: dict[int, tuple[weakref.ref[UntypedStorage], _Made]] = {}
        self._changed: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _CHEAP:
            self._note(func, args, kwargs, result)
        elif func.namespace != "aten":
            self._write(_tensors((args, kwargs)))
        elif func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given |= kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._write(changed := list(_tensors(given.get(argument.name))))
                    if func.__name__.startswith("_foreach"):  # where modes look, it counts none
                        increment_version(changed)
        return result

    def made_of(self, tensor: Tensor) -> _Made | None:
        """How its storage was made, if a cheap operator did."""
        storage, made = self._made.get(_key(tensor), (None, None))
        # One that is gone may have given its place to another.
        return made if storage is not None and storage() is not None else None

    def sound_ends(self, made: _Made, kept: Mapping[int, Tensor]) -> list[Tensor] | None:
        """The tensors of which it is made where those of ``kept`` are there; None where one of
        them, or what is between, was written into."""
        found: list[Tensor] = []
        if made.is_written or made.differs:
            return None
        for leaf in tree_leaves((made.args, made.kwargs)):
            if isinstance(leaf, _View):
                if (there := leaf.made.among(kept)) is not None and not leaf.made.is_written:
                    found.append(there)
                    continue
                behind = self.sound_ends(leaf.made, kept)
                if behind is None:
                    return None
                found += behind
            elif isinstance(leaf, Tensor):
                if _key(leaf) in self._changed | self._never:
                    return None
                found.append(leaf)
        return found

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        def of(leaf: Tensor) -> Tensor | _View:
            made = self.made_of(leaf)
            if made is not None and leaf._version != made.version:
                made.is_written = True
            if made is None or not made.is_like(leaf) or made.num_calls >= MOST_CALLS:
                return leaf  # itself: one detached here would not know what is written into it
            return _View.of(leaf, made)

        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(leaf.layout is torch.strided and leaf.is_floating_point() for leaf in leaves):
            return  # whole numbers become what torch's default dtype says
        given = {_key(leaf) for leaf in _tensors((args, kwargs))}
        results = result if isinstance(result, tuple) else (result,)
        for i, tensor in enumerate(results):
            if isinstance(tensor, Tensor) and _key(tensor) not in given:
                taken, named = tree_map_only(Tensor, of, (args, kwargs))
                storage = tensor.untyped_storage()
                about = i, tensor.dtype, _key(tensor), weakref.ref(storage), tensor._version
                made = _Made(func, taken, named, *about)
                self._made[_key(tensor)] = made.storage, made

    def _write(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._changed.add(_key(tensor))
            if (made := self.made_of(tensor)) is not None:
                made.is_written = True


@dataclass
class _Made:
    """The storage ``key`` of a cheap operator's result ``index``, which can be made again. Then it
    is there for the ``left`` tensors of it that the backward has still to take."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    index: int
    dtype: torch.dtype
    key: int
    storage: weakref.ref[UntypedStorage]
    version: int
    is_written: bool = False
    left: int = 0
    value: Tensor | None = None
    versions: tuple[int, ...] = ()
    num_calls: int = 1

    def __post_init__(self) -> None:
        leaves = tree_leaves((self.args, self.kwargs))
        behind = (leaf.made.num_calls for leaf in leaves if isinstance(leaf, _View))
        self.num_calls += sum(behind)
        self.versions = self._versions()

    def is_like(self, tensor: Tensor) -> bool:
        """Whether it is a plain view of what is made."""
        return tensor.dtype == self.dtype and not tensor.is_conj() and not tensor.is_neg()

    def among(self, kept: Mapping[int, Tensor]) -> Tensor | None:
        """What is kept of this storage."""
        there = kept.get(self.key) if self.storage() is not None else None
        return there if there is not None and self.is_like(there) else None

    @property
    def differs(self) -> bool:
        """Whether something that it is made of was written into since that was noted."""
        return self._versions() != self.versions

    def _versions(self) -> tuple[int, ...]:
        leaves = tree_leaves((self.args, self.kwargs))
        return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor))

    def take_from(self, kept: Mapping[int, Tensor]) -> None:
        """Be made of what is kept, as far as it is."""

        def of(view: _View) -> Any:
            if (there := view.made.among(kept)) is not None:
                return there.detach().as_strided(view.size, view.stride, view.offset)
            view.made.take_from(kept)
            return view

        self.args, self.kwargs = tree_map_only(_View, of, (self.args, self.kwargs))
        self.versions = self._versions()

    def make(self) -> Tensor:
        """The operator's result; raises _Written."""
        if (known := self.value) is not None:
            return known
        if self.differs:
            raise _Written
        args, kwargs = tree_map_only(_View, _View.take, (self.args, self.kwargs))
        result = self.func(*args, **kwargs)
        made: Tensor = result[self.index] if isinstance(result, tuple) else result
        if self.left > 0:
            self.value = made
        return made

    def ends(self) -> list[Tensor]:
        """What is kept so that it can be made."""
        found: list[Tensor] = []
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, _View):
                found += leaf.made.ends()
            elif isinstance(leaf, Tensor):
                found.append(leaf)
        return found


@dataclass(frozen=True)
class _View:
    """A tensor of a storage that is made."""

    made: _Made
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, made: _Made) -> _View:
        """As ``tensor`` is of its storage."""
        return cls(made, tensor.storage_offset(), tensor.size(), tensor.stride())

    def take(self) -> Tensor:
        """The tensor."""
        return self.made.make().as_strided(self.size, self.stride, self.offset)


class _Saved:
    """What autograd holds in place of a tensor that ``layer`` saved."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self.layer, self.tensor, self.version = layer, tensor, tensor._version
        self.view: _View | None = None

    def leave_to(self, made: _Made) -> None:
        """It is made when it is wanted."""
        self.view = _View.of(self.tensor, made)
        made.left += 1
        del self.tensor

    def take(self) -> Tensor:
        """For the backward pass."""
        if self.view is None:
            if self.tensor._version != self.version:
                raise written(self.layer)
            return self.tensor
        made = self.view.made
        try:
            with torch.no_grad(), _without_autocast():
                tensor = self.view.take()
        except _Written:
            raise written(self.layer) from None
        made.left -= 1
        if made.left <= 0:
            made.value = None
        return tensor


class _Written(Exception):
    """What an operator's result is made of was written into."""


def _take(saved: Tensor | _Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.take()


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _tensors(of: Any) -> Iterator[Tensor]:
    return _strided(leaf for leaf in tree_leaves(of) if isinstance(leaf, Tensor))


def _strided(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.layout is torch.strided)


def _key(tensor: Tensor) -> int:
    """What tells its storage from others while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _num_bytes(tensor: Tensor) -> int:
    num: int = tensor.untyped_storage().nbytes()
    return num
