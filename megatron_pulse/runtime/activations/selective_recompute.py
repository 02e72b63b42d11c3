"""Selective activation recomputation: saved tensors that cheap operators can rebuild
are dropped.
"""

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

from megatron_pulse.runtime.activations.inplace_check import modified_inplace, version_of

LEAST_BYTES = 1 << 12
"""Smaller tensors are saved: recomputation costs more time than the memory is worth."""

WORTH = 0.5
"""Limit on additionally saved bytes, as a fraction of the dropped tensor's bytes."""

MOST_CALLS = 32
"""Maximum number of cheap operators called to rebuild one tensor."""

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
"""Deterministic operators whose time is about that of reading and writing their tensors."""


class SelectiveRecompute:
    """Selective recomputation of one layer on one microbatch.

    Norms, activation functions, elementwise sums and products, casts and upsampling are a small
    part of a layer's work and half of its saved bytes. Results of matrix products, convolutions,
    attention and random operators are saved. In a feed-forward block::

        x    -> norm -> n -> linear -> h -> gelu -> g -> linear -> out
        saved   (dropped)   saved      (dropped)
        backward: g = gelu(h), n = norm(x) for the weight gradients of the linear layers

    Every operator is followed while the layer runs. A saved tensor is dropped if cheap operators
    rebuild it from three sources: other saved tensors, parameters, and replacements. Replacements
    have at most the fraction ``WORTH`` of its bytes, and are saved in its place.

    Backward calls the same operators on the same tensors, so results are bitwise equal. Tensors
    modified in place within the layer are not used as sources. Neither are ``buffers``, which other
    code may change. Backward raises PulseError, naming ``layer``, if a saved tensor was modified in
    place later. Writes that bypass torch (NumPy, ``.data``) are not detected.

    Results of cheap operators that nobody holds are freed at once, as usual. Other results that
    cheap operators consumed are freed when the layer ends.
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
        """Run the layer within this context; dropped tensors are chosen at the end."""
        followed = _Followed(self._buffers)
        with saved_tensors_hooks(self._pack, _take), followed:
            yield
        self._choose(followed)
        # Autograd keeps the pack hook alive as long as any saved tensor of the layer: hold weak
        # references.
        self._known, self._saved = list(map(weakref.ref, self._saved)), []

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors kept for backward, before backward takes any."""
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
        """Drop tensors that can be rebuilt, the largest first."""
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
    """Dispatch mode that records which operators produce and modify which storages."""

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
                    if func.__name__.startswith(
                        "_foreach"
                    ):  # no version counter increases where modes look
                        increment_version(changed)
        return result

    def made_of(self, tensor: Tensor) -> _Made | None:
        """Recorded cheap operator that produced the storage of ``tensor``; None if
        there is none.
        """
        storage, made = self._made.get(_key(tensor), (None, None))
        # A freed storage's key may have been reused.
        return made if storage is not None and storage() is not None else None

    def sound_ends(self, made: _Made, kept: Mapping[int, Tensor]) -> list[Tensor] | None:
        """Tensors from which ``made`` is rebuilt, given those in ``kept``.

        None if any source or intermediate result was modified in place.
        """
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
            if made is not None and version_of(leaf) != made.version:
                made.is_written = True
            if made is None or not made.is_like(leaf) or made.num_calls >= MOST_CALLS:
                return leaf  # not detached: a detached alias would not see later in-place writes
            return _View.of(leaf, made)

        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(leaf.layout is torch.strided and leaf.is_floating_point() for leaf in leaves):
            return  # promotion of integers depends on torch's default dtype
        given = {_key(leaf) for leaf in _tensors((args, kwargs))}
        results = result if isinstance(result, tuple) else (result,)
        for i, tensor in enumerate(results):
            if isinstance(tensor, Tensor) and _key(tensor) not in given:
                taken, named = tree_map_only(Tensor, of, (args, kwargs))
                storage = tensor.untyped_storage()
                about = i, tensor.dtype, _key(tensor), weakref.ref(storage), version_of(tensor)
                made = _Made(func, taken, named, *about)
                self._made[_key(tensor)] = made.storage, made

    def _write(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._changed.add(_key(tensor))
            if (made := self.made_of(tensor)) is not None:
                made.is_written = True


@dataclass
class _Made:
    """Rebuildable storage ``key``: result ``index`` of a cheap operator.

    A rebuilt value is cached while ``left`` saved tensors of the storage are still to be taken.
    """

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
        """Test for a plain view: same dtype, neither conjugated nor negated."""
        return tensor.dtype == self.dtype and not tensor.is_conj() and not tensor.is_neg()

    def among(self, kept: Mapping[int, Tensor]) -> Tensor | None:
        """Kept tensor on this storage, if any."""
        there = kept.get(self.key) if self.storage() is not None else None
        return there if there is not None and self.is_like(there) else None

    @property
    def differs(self) -> bool:
        """True if a source was modified in place since it was recorded."""
        return self._versions() != self.versions

    def _versions(self) -> tuple[int, ...]:
        leaves = tree_leaves((self.args, self.kwargs))
        return tuple(version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def take_from(self, kept: Mapping[int, Tensor]) -> None:
        """Replace references to kept storages by the kept tensors."""

        def of(view: _View) -> Any:
            if (there := view.made.among(kept)) is not None:
                return there.detach().as_strided(view.size, view.stride, view.offset)
            view.made.take_from(kept)
            return view

        self.args, self.kwargs = tree_map_only(_View, of, (self.args, self.kwargs))
        self.versions = self._versions()

    def make(self) -> Tensor:
        """Rebuild the operator's result. Raises ``_Written`` if a source was modified."""
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
        """Tensors kept as sources of this storage."""
        found: list[Tensor] = []
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, _View):
                found += leaf.made.ends()
            elif isinstance(leaf, Tensor):
                found.append(leaf)
        return found


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a rebuildable storage."""

    made: _Made
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, made: _Made) -> _View:
        return cls(made, tensor.storage_offset(), tensor.size(), tensor.stride())

    def take(self) -> Tensor:
        return self.made.make().as_strided(self.size, self.stride, self.offset)


class _Saved:
    """Stand-in held by autograd for a tensor that ``layer`` saved."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self.layer, self.tensor, self.version = layer, tensor, tensor._version
        self.view: _View | None = None

    def leave_to(self, made: _Made) -> None:
        """Drop the tensor and rebuild it through ``made`` in backward."""
        self.view = _View.of(self.tensor, made)
        made.left += 1
        del self.tensor

    def take(self) -> Tensor:
        """Return the tensor for backward."""
        if self.view is None:
            if self.tensor._version != self.version:
                raise modified_inplace(self.layer)
            return self.tensor
        made = self.view.made
        try:
            with torch.no_grad(), _without_autocast():
                tensor = self.view.take()
        except _Written:
            raise modified_inplace(self.layer) from None
        made.left -= 1
        if made.left <= 0:
            made.value = None
        return tensor


class _Written(Exception):
    """A source of a rebuilt result was modified in place."""


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
    """Identity of the tensor's storage, valid while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _num_bytes(tensor: Tensor) -> int:
    num: int = tensor.untyped_storage().nbytes()
    return num
